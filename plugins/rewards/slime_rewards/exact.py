r"""Reward 1.0 when the final answer equals the label, else 0.0.

The final answer is the content of the last `\boxed{...}`; without a box it is the whole response. Both sides are
stripped and compared without regard to case. A label that is a number is compared by value, since a column of integers
with a gap is read as floats: `42` answers 42.0. A label may be boxed, and a list of labels means any of them; another
label is an error. A response cut at the token limit has no final answer.
"""

from __future__ import annotations

import re
from typing import Any

from slime_core import Args, RewardTraits, Sample, SampleStatus, declares, last_boxed, right_answers, same_number

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


def extract_answer(sample: Sample) -> str | None:
    """The final answer as it is compared; None of a response that was cut, or whose box never closes."""
    if sample.status == SampleStatus.TRUNCATED:
        return None
    answer = last_boxed(sample.response) if _BOX.search(sample.response) else sample.response
    return None if answer is None else _plain(answer)


@declares(RewardTraits(execution="inline", extract_answer=extract_answer))
def reward(args: Args, sample: Sample) -> float:
    r"""Return 1.0 or 0.0 for the last `\boxed{...}` of the response, or the response itself, against the label.

    Raises:
        ValueError: The label cannot be read (`right_answers`).
    """
    labels = sample.label if isinstance(sample.label, (list, tuple)) else [sample.label]
    texts = right_answers(sample.label)
    answer = extract_answer(sample)
    return float(answer is not None and any(_answers(answer, *each) for each in zip(labels, texts)))


def _answers(answer: str, label: Any, text: str) -> bool:
    if isinstance(label, (int, float)) and not isinstance(label, bool):
        return bool(same_number(answer, text))
    boxed = last_boxed(text)
    return answer == _plain(text if boxed is None else boxed)


def _plain(text: str) -> str:
    return text.strip().casefold()
