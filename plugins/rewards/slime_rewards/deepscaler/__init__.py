r"""1.0 when the boxed answer after the reasoning equals the label, else 0.0.

Source: DeepScaleR (Agentica, 2025) and THUDM/slime's `deepscaler`. The answer is the last `\boxed{...}` after the last
`</think>`, or after the last `###Response` where no `</think>` is; a response with neither marker scores 0.0, and so
does one without a box after it. The label may be boxed; a list of labels means any of them. Equal means: spelt alike
once normalised as in the MATH data set (Hendrycks et al., 2021), or equal for `math` (`slime_reward_math`).

A fraction must be reduced when the label is one (`\frac{2}{4}` is not `\frac{1}{2}`, but it is 0.5), as in the MATH
grader; `math` takes both.
"""

from __future__ import annotations

import math
import re

from slime_reward_math import equal_contents

from slime_core import Args, RewardTraits, Sample, declares, last_boxed, right_answers, same_number
from slime_rewards.deepscaler.spelling import normalized

MARKERS = ("</think>", "###Response")
"""The answer stands after the last one of the first marker that occurs."""

_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*-?(\d+)\s*\}|(\d))\s*(?:\{\s*-?(\d+)\s*\}|(\d))|(\d+)\s*/\s*-?(\d+)")
_PERCENT = re.compile(r"\\?%")


def extract_answer(sample: Sample) -> str | None:
    """The answer as it is spelt once normalised, for votes; equal expressions that are spelt differently are two."""
    answer = _boxed_answer(sample.response)
    return None if answer is None else normalized(answer) or None


@declares(RewardTraits(execution="process", extract_answer=extract_answer))  # sympy takes seconds
def reward(args: Args, sample: Sample) -> float:
    """Return 1.0 or 0.0; an answer or label that is no mathematics is equal only if spelt alike.

    Raises:
        ValueError: The label cannot be read (`right_answers`).
    """
    labels, answer = right_answers(sample.label, parses=True), _boxed_answer(sample.response)
    return float(answer is not None and any(equal(answer, _bare(label)) for label in labels))


def _boxed_answer(response: str) -> str | None:
    marker = next((m for m in MARKERS if m in response), None)
    return None if marker is None else last_boxed(response.rpartition(marker)[2])


def equal(answer: str, label: str) -> bool:
    """Return True for one number, for answers spelt alike in the manner of MATH, and for those that `math` calls equal.

    Percent signs are dropped. A fraction must be reduced where the label has one.
    """
    answer, label = (_PERCENT.sub("", " ".join(text.split())) for text in (answer, label))
    given, expected = normalized(answer), normalized(label)
    if not given or not expected:
        return False
    if given == expected:
        return same_number(answer, label) is not False  # without blanks `1 1/2` is 11/2
    if _FRACTION.search(label) and any(map(_is_unreduced, _FRACTION.finditer(answer))):
        return False
    return equal_contents(answer, label)


def _is_unreduced(fraction: re.Match[str]) -> bool:
    above, below = (int(group) for group in fraction.groups() if group is not None)
    return math.gcd(above, below) > 1


def _bare(text: str) -> str:
    boxed = last_boxed(text)
    return text if boxed is None else boxed
