"""What the stages call and what plugins implement; nothing here runs.

Standard library only at run time (torch appears in annotations). User-facing functions take `args` first, with
attribute access to every setting, as in THUDM/slime. Components never hold a reference to the loop; the loop
builds them and calls them. Everybody imports the names from here; the modules are by stage: `functions`, `environment`,
`engine`, `algorithm`, `trainer`, `weights`.
"""

from slime_core.protocols.algorithm import (
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    LossInputs,
    LossOutputs,
    RewardInputs,
)
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
from slime_core.protocols.trainer import (
    LossFn,
    MicroBatchOutput,
    StepResult,
    Trainer,
)
from slime_core.protocols.weights import (
    TransportTraits,
    WeightEngines,
    WeightTransport,
)

__all__ = [
    "AdvantageEstimator",
    "AdvantageInputs",
    "Advantages",
    "Args",
    "BatchRewardFn",
    "BufferFilter",
    "DataSource",
    "DynamicFilter",
    "Environment",
    "GenerateContext",
    "GenerateFn",
    "GroupBuffer",
    "LossFn",
    "LossInputs",
    "LossOutputs",
    "MicroBatchOutput",
    "Observation",
    "Reward",
    "RewardFn",
    "RewardInputs",
    "RolloutEngine",
    "Step",
    "StepResult",
    "Trainer",
    "TransportTraits",
    "Turn",
    "WeightEngines",
    "WeightTransport",
]
