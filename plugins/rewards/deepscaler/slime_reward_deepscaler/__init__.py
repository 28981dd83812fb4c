r"""1.0 when the boxed answer after the reasoning equals the label, else 0.0.

Source: DeepScaleR (Agentica, 2025) and THUDM/slime's `deepscaler`. The answer is the last `\boxed{...}` after the last
`</think>`, or after the last `###Response` where no `</think>` is; a response with neither marker scores 0.0, and so
does one without a box after it. The label may be boxed; a list of labels means any of them. Equal means: spelt alike
once normalised as in the MATH data set (Hendrycks et al., 2021), or equal as sympy expressions.

A fraction must be reduced when the label is one (`\frac{2}{4}` is not `\frac{1}{2}`, but it is 0.5), as in the MATH
grader; `math` takes both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from slime_core import Args, RewardTraits, Sample, declares, last_boxed, same_number
from slime_reward_deepscaler.spelling import normalized
from slime_reward_deepscaler.symbolic import equal_expressions

MARKERS = ("</think>", "###Response")
"""The answer stands after the last one of the first marker that occurs."""

_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*-?(\d+)\s*\}|(\d))\s*(?:\{\s*-?(\d+)\s*\}|(\d))|(\d+)\s*/\s*-?(\d+)")
_PERCENT = re.compile(r"\\?%")
_UNSAID = re.compile(r"\\(?:[hv]?phantom|[bx]?cancel|sout)(?![A-Za-z])|_(?!\{?10(?!\d))")
"""What is not shown, and a base: sympy's grammar reads over both."""
_AND = re.compile(r"\s*,?\s+(?:or|and)\s+")
_BRACKETS = {"(": ")", "[": "]"}


def extract_answer(sample: Sample) -> str | None:
    """The answer as it is spelt once normalised, for votes; equal expressions that are spelt differently are two."""
    answer = _boxed_answer(sample.response)
    return None if answer is None else normalized(answer) or None


@declares(RewardTraits(execution="process", extract_answer=extract_answer))  # sympy can take for ever
def reward(args: Args, sample: Sample) -> float:
    """1.0 or 0.0; what cannot be parsed, on either side, is unequal unless spelt alike."""
    answer = _boxed_answer(sample.response)
    if answer is None or sample.label is None:
        return 0.0
    labels = sample.label if isinstance(sample.label, (list, tuple)) else [sample.label]
    return float(any(equal(answer, _bare(label)) for label in labels))


def _boxed_answer(response: str) -> str | None:
    marker = next((m for m in MARKERS if m in response), None)
    return None if marker is None else last_boxed(response.rpartition(marker)[2])


def equal(answer: str, label: str) -> bool:
    """One number, equal as spelt in the manner of MATH, or as expressions; intervals and tuples part by part."""
    answer, label = _plain(answer), _plain(label)
    if _UNSAID.search(answer) and not _UNSAID.search(label):
        return False
    given, expected = normalized(answer), normalized(label)
    if not given or not expected:
        return False
    same = same_number(answer, label)
    if given == expected:
        return same is not False  # without blanks `1 1/2` is 11/2
    if same is not None:
        return _equal_parts(answer, label)
    given_parts, expected_parts = _parts(given), _parts(expected)
    if len(given_parts) != len(expected_parts) or (
        len(expected_parts) > 1 and (given[0], given[-1]) != (expected[0], expected[-1])
    ):
        return False
    return all(_equal_parts(g, e) for g, e in zip(given_parts, expected_parts))


def _plain(text: str) -> str:
    """Without percent signs and braces around all of it; several answers with commas between them."""
    text = " ".join(text.split())  # of two patterns for blanks in a row each tries all lengths
    text = _AND.sub(",", _PERCENT.sub("", text).replace("\\{", "{").replace("\\}", "}")).strip()
    inner = text[1:-1]
    return inner if text == f"{{{inner}}}" and "{" not in inner and "}" not in inner else text


def _equal_parts(given: str, expected: str) -> bool:
    if given == expected:
        return True
    same = same_number(given, expected)
    if same is None:
        return equal_expressions(given, expected)
    return same and not (_FRACTION.search(expected) and _is_unreduced(given))


def _is_unreduced(text: str) -> bool:
    fraction = _FRACTION.search(text)
    above, below = [int(g) for g in fraction.groups() if g is not None] if fraction else (1, 1)
    return math.gcd(above, below) > 1


def _parts(text: str) -> Sequence[str]:
    """The members of a tuple or interval; the text itself when it is neither."""
    if len(text) < 3 or text[0] not in _BRACKETS or text[-1] not in ")]" or "," not in text:
        return [text]
    if any(character in text[1:-1] for character in "()[]"):
        return [text]
    return text[1:-1].split(",")


def _bare(label: Any) -> str:
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    text = str(label)
    boxed = last_boxed(text)
    return text if boxed is None else boxed
