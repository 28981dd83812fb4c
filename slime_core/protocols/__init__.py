"""What the stages call and what plugins implement; nothing here runs.

Standard library only at run time (torch appears in annotations). User-facing functions take `args` first, with
attribute access to every setting, as in THUDM/slime. Components never hold a reference to the loop; the loop
builds them and calls them. Everybody imports the names from here; the modules are by stage: `functions`,
`environment`, `engine`, `algorithm`, `trainer`, `weights`; around them: `launcher`, `command`; `traits` is what
components say of themselves.
"""

from slime_core.protocols.algorithm import (
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    LossInputs,
    LossOutputs,
    RewardInputs,
)
from slime_core.protocols.command import Command
from slime_core.protocols.engine import (
    GenerateContext,
    RolloutEngine,
)
from slime_core.protocols.environment import (
    Environment,
    Observation,
    Step,
    Turn,
)
from slime_core.protocols.functions import (
    Args,
    BatchRewardFn,
    BufferFilter,
    DataSource,
    DynamicFilter,
    GenerateFn,
    GroupBuffer,
    Reward,
    RewardFn,
)
from slime_core.protocols.launcher import Launcher
from slime_core.protocols.trainer import (
    LossFn,
    MicroBatchOutput,
    StepResult,
    Trainer,
)
from slime_core.protocols.traits import (
    EditTraits,
    EngineTraits,
    GenerateTraits,
    LauncherTraits,
    RewardTraits,
    RolloutTraits,
    TrainerTraits,
    TransportTraits,
    declares,
    traits_of,
    with_defaults,
)
from slime_core.protocols.weights import WeightEngines, WeightTransport

__all__ = [
    "AdvantageEstimator",
    "AdvantageInputs",
    "Advantages",
    "Args",
    "BatchRewardFn",
    "BufferFilter",
    "Command",
    "DataSource",
    "DynamicFilter",
    "EditTraits",
    "EngineTraits",
    "Environment",
    "GenerateContext",
    "GenerateFn",
    "GenerateTraits",
    "GroupBuffer",
    "Launcher",
    "LauncherTraits",
    "LossFn",
    "LossInputs",
    "LossOutputs",
    "MicroBatchOutput",
    "Observation",
    "Reward",
    "RewardFn",
    "RewardInputs",
    "RewardTraits",
    "RolloutEngine",
    "RolloutTraits",
    "Step",
    "StepResult",
    "Trainer",
    "TrainerTraits",
    "TransportTraits",
    "Turn",
    "WeightEngines",
    "WeightTransport",
    "declares",
    "traits_of",
    "with_defaults",
]
