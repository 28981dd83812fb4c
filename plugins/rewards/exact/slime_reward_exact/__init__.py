r"""Reward 1.0 when the final answer equals the label, else 0.0.

The final answer is the content of the last `\boxed{...}`; without a box it is the whole response. Both sides are
stripped and compared without regard to case. A response cut at the token limit has no final answer.
"""

from __future__ import annotations

from slime_core import Args, RewardTraits, Sample, SampleStatus, declares, last_boxed

_OPENING = r"\boxed{"


def extract_answer(sample: Sample) -> str | None:
    """The final answer as it is compared; None of a response that was cut, or whose box never closes."""
    if sample.status == SampleStatus.TRUNCATED:
        return None
    answer = last_boxed(sample.response) if _OPENING in sample.response else sample.response
    return None if answer is None else _plain(answer)


@declares(RewardTraits(execution="inline", extract_answer=extract_answer))
def reward(args: Args, sample: Sample) -> float:
    r"""1.0 or 0.0 for the last `\boxed{...}` of the response, or the response itself, against the label."""
    if sample.label is None or sample.status == SampleStatus.TRUNCATED:
        return 0.0
    return float(extract_answer(sample) == _plain(str(sample.label)))


def _plain(text: str) -> str:
    return text.strip().casefold()
