r"""Reward 1.0 when the final answer equals the label, else 0.0.

The final answer is the content of the last `\boxed{...}`; without a box it is the whole response. Both sides are
stripped and compared without regard to case. A label that is a number is compared by value, since a column of integers
with a gap is read as floats: `42` answers 42.0. A label may be boxed, and a list of labels means any of them. A
response cut at the token limit has no final answer.
"""

from __future__ import annotations

import re
from typing import Any

from slime_core import Args, RewardTraits, Sample, SampleStatus, declares, last_boxed, same_number

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


def extract_answer(sample: Sample) -> str | None:
    """The final answer as it is compared; None of a response that was cut, or whose box never closes."""
    if sample.status == SampleStatus.TRUNCATED:
        return None
    answer = last_boxed(sample.response) if _BOX.search(sample.response) else sample.response
    return None if answer is None else _plain(answer)


@declares(RewardTraits(execution="inline", extract_answer=extract_answer))
def reward(args: Args, sample: Sample) -> float:
    r"""Return 1.0 or 0.0 for the last `\boxed{...}` of the response, or the response itself, against the label."""
    answer = extract_answer(sample)
    labels = sample.label if isinstance(sample.label, (list, tuple)) else [sample.label]
    return float(answer is not None and any(_answers(answer, label) for label in labels))


def _answers(answer: str, label: Any) -> bool:
    if label is None:
        return False
    boxed = last_boxed(str(label))
    text = _plain(str(label) if boxed is None else boxed)
    if isinstance(label, (int, float)) and not isinstance(label, bool) and same_number(text, text):
        return bool(same_number(answer, text))
    return answer == text


def _plain(text: str) -> str:
    return text.strip().casefold()
