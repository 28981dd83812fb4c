"""The data that crosses stages: samples, groups, filter decisions, engine answers, train batches.

    sample.py          `Sample`, from prompt to reward, and its status
    types.py           results of filters, rollout functions and engines; the trainer's batch; fan-out siblings
    provenance.py      spans: who wrote which tokens
    admission.py       the invariants of every sample that is trained on
    columns.py         columns of the trainer's batch, one entry per sample
    stored.py          a sample as JSON values
    routed_experts.py  experts to which an engine routed the tokens

All data are plain values, so they can be sent to other processes as JSON. Standard library only.
"""

from slime_core.sample.provenance import NOT_SAMPLED
from slime_core.sample.sample import (
    LARGEST_SCORE,
    Group,
    PrefixCacheInfo,
    Sample,
    SampleStatus,
    SpecInfo,
    is_score,
)
from slime_core.sample.types import (
    DynamicFilterOutput,
    FilterDecision,
    GenerationOutput,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    TrainBatch,
)

__all__ = [
    "LARGEST_SCORE",
    "NOT_SAMPLED",
    "DynamicFilterOutput",
    "FilterDecision",
    "GenerationOutput",
    "Group",
    "PrefixCacheInfo",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "SampleStatus",
    "SpecInfo",
    "TrainBatch",
    "is_score",
]
