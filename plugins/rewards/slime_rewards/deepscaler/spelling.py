r"""An answer in the spelling of the MATH data set (Hendrycks et al., 2021): `0.5` is `\frac{1}{2}`, `45^\circ` is `45`.

`equal` compares two of these. Nothing is evaluated here.
"""

from __future__ import annotations

import re

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
