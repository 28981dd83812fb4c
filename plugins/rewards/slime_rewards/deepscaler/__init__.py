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

MARKERS = ("</think>", "###Response")
"""The answer stands after the last one of the first marker that occurs."""

_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*-?(\d+)\s*\}|(\d))\s*(?:\{\s*-?(\d+)\s*\}|(\d))|(\d+)\s*/\s*-?(\d+)")
_MOST_DIGITS = 1000
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
    above, below = (group for group in fraction.groups() if group is not None)
    return max(len(above), len(below)) > _MOST_DIGITS or math.gcd(int(above), int(below)) > 1


def _bare(text: str) -> str:
    boxed = last_boxed(text)
    return text if boxed is None else boxed


_DROPPED = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;: ]|\^\s*\{?\s*\\circ\s*\}?|\\?\$|\\?%|\\displaystyle")
_COMMAND = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
_UNIT_AT_END = re.compile(
    r"(?<=\d)\s*\\(?:text|mathrm|mbox)\s*\{(?![^{}]*\b(?:or|and|not|is|but|wrong|incorrect|false)\b)[^{}]*\}(?:\^\{?\d\}?)?\s*$"
)
_WORD_AT_END = re.compile(
    r"(?<=[\d}])\s*(?:degrees?|cm|(?:centi)?met(?:er|re)s?|miles?|seconds?|minutes?|hours?|days?|weeks?|months?|years?"
    r"|foot|feet|inch(?:es)?|yards?)\s*(?:\^\s*\{?\d\}?)?$"
)
"""Units that THUDM/slime's grader takes away."""
_BARE_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)|\\frac\s*\{([^{}]+)\}\s*(\d)|\\frac\s*(\d)\s*\{([^{}]+)\}")
_SLASH = re.compile(r"(-?\d+)\s*/\s*(-?\d+)")
_ROOT = re.compile(r"\\sqrt\s*(\w)")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"-?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")
_APART = re.compile(r"(?<=\d)\s+(?!\d{3}(?!\d))(?=\d)")
"""Between two numbers: `4 5` is not 45, and `1 000` is 1000."""


def normalized(answer: str) -> str:
    r"""No blanks, units, degrees, `\left`, `x=`; whole fractions and roots in braces; `a/b` as `\frac{a}{b}`."""
    text = answer.strip().rstrip(".").replace("\n", "")
    if _GROUPED.fullmatch(text):
        text = _THOUSANDS.sub("", text)
    text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    text = _WORD_AT_END.sub("", _UNIT_AT_END.sub("", text))
    text = _COMMAND.sub(r"\1", _DROPPED.sub("", re.sub(r"\\[,;: ]", " ", text)))
    text = _BARE_FRACTION.sub(_braced, text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = "".join(_APART.sub("~", text).split())
    head, equals, tail = text.partition("=")
    if equals and len(head) <= 2 and not head.isdecimal() and "=" not in tail:
        text = tail
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    if text in ("0.5", "-0.5"):
        return text.replace("0.5", "\\frac{1}{2}")
    slash = _SLASH.fullmatch(text)
    return f"\\frac{{{slash[1]}}}{{{slash[2]}}}" if slash else text


def _braced(match: re.Match[str]) -> str:
    above, below = (group for group in match.groups() if group is not None)
    return f"\\frac{{{above}}}{{{below}}}"
