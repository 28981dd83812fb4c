"""The data that crosses stages: samples, groups, filter decisions, engine answers, train batches.

    sample.py          `Sample`, from prompt to reward, and its status
    types.py           what filters, rollout functions and engines return, and the trainer's batch
    fan_out.py         samples of one call of a generate function count once
    provenance.py      spans: who wrote which tokens
    admission.py       the invariants of every sample that is trained on
    columns.py         columns of the trainer's batch, one entry per sample
    stored.py          a sample as JSON values
    multimodal.py      images of a sample; routed_experts.py: experts that an engine routed to
    buffer.py          the base class of buffers, which keep groups between rollouts

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
