"""A group that is given back -> what of it goes on and what starts afresh, execution by execution.

Called by whoever hands groups back: `rollout.decisions`, `rollout.schedule`, `rollout.producer`, `rollout.stage_state`.
What a reader would get wrong: a fan-out is whole or it is nothing. Its siblings are kept when all of them are finished,
and wait in their group beside samples that go on; when one was interrupted or has failed, the sample that they were
made of takes their place. A sibling is no such sample (it may have another prompt), so kept ones carry theirs along.
"""

from __future__ import annotations

from slime_core.fan_out import executions
from slime_core.types import Group, Sample, SampleStatus

ORIGIN = "fan_out_origin"
"""Entry of `sample.metadata` of the first of several kept siblings: the sample that they were made of, as a prompt."""
FINISHED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


def restarted(group: Group) -> Group:
    """The group as prompts, one sample per execution. Samples without siblings are reset in place."""
    origins = [_origin(siblings[0]) for siblings in executions(group)]
    for sample in origins:
        sample.reset_for_retry()
    return origins


def prompts_of(group: Group) -> Group:
    """The same of copies; the group stays as it is."""
    return restarted([_copy(sample) for sample in group])


def remains(original: Group, group: Group) -> Group:
    """What a group that was generated is given back as.

    Args:
        original: As it was drawn.
        group: What has become of it, interrupted or finished: an execution for every one of `original`, in order.

    Returns:
        Finished executions whole; others as the sample that goes on, or is to. A group whose executions cannot be told
        apart (a generate function gave several the same `rollout_id`) is started afresh, unless it is finished.
    """
    before, after = executions(original), executions(group)
    if len(before) != len(after):
        done = all(s.status not in (SampleStatus.ABORTED, SampleStatus.PENDING) for s in group)
        return group if done else restarted(original)
    return [sample for drawn, siblings in zip(before, after) for sample in _remains(drawn, siblings)]


def is_whole(siblings: Group) -> bool:
    """Whether an execution is one sample, or all of its samples are finished."""
    return len(siblings) == 1 or all(s.status in FINISHED for s in siblings)


def _remains(drawn: Group, siblings: Group) -> Group:
    first = siblings[0]
    if len(siblings) == 1:
        return siblings if first.index == drawn[0].index else drawn[:1]
    if len(drawn) == 1 and ORIGIN not in first.metadata:
        first.metadata[ORIGIN] = prompts_of(drawn)[0].to_dict()
    return siblings


def _origin(sample: Sample) -> Sample:
    stored = sample.metadata.get(ORIGIN)
    return sample if stored is None else Sample.from_dict(stored)


def _copy(sample: Sample) -> Sample:
    return Sample.from_dict(sample.to_dict())
