"""Interfaces that the stages call and plugins implement; this package contains no implementation.

It needs only the standard library at run time (torch appears in annotations). User-facing functions take `args` first,
with attribute access to every setting, as in THUDM/slime. Components never hold a reference to the loop; the loop
builds them and calls them. This package exports the protocols that every run uses: `functions`, `engine`, `algorithm`,
`trainer`, `command`, and `traits` (declarations of a component). An implementation of another protocol imports its
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
