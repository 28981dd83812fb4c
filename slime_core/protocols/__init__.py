"""What the stages call and what plugins implement; nothing here runs.

Standard library only at run time (torch appears in annotations). User-facing functions take `args` first, with
attribute access to every setting, as in THUDM/slime. Components never hold a reference to the loop; the loop
builds them and calls them. Everybody imports from here what every run has: `functions`, `engine`, `algorithm`,
`trainer`, `command`, and `traits`, what components say of themselves. Who implements one of the others imports its
module: `environment`, `launcher`, `weights`.
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
    "GenerateContext",
    "GenerateFn",
    "GenerateTraits",
    "GroupBuffer",
    "LauncherTraits",
    "LossFn",
    "LossInputs",
    "LossOutputs",
    "MicroBatchOutput",
    "Reward",
    "RewardFn",
    "RewardInputs",
    "RewardTraits",
    "RolloutEngine",
    "RolloutTraits",
    "StepResult",
    "Trainer",
    "TrainerTraits",
    "TransportTraits",
    "declares",
    "traits_of",
    "with_defaults",
]
