r"""A number as people and models write it -> its value: `1,000`, `1e3`, `\frac{2000}{2}` and `10^3` are one number.

Rewards that grade mathematics ask `same_number` before they compare spellings or expressions, so that no two of them
disagree on it. Values are exact, so 0.333 is not 1/3; and a percent sign makes a text no number, since graders differ
on whether 50% is 50 or 0.5.
"""

from __future__ import annotations

import re
from fractions import Fraction

_LONGEST = 200
"""Characters."""
_LARGEST_EXPONENT = 1000
_SPACE = r"(?:\s|\\[,!;: ])*"
_INTEGER = r"(?:\d{1,3}(?:(?:,(?:\\!)?|\{,\}|\\,| )\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_POWER = rf"{_SPACE}(?:\\times|\\cdot|\*|x|\u00d7){_SPACE}10{_SPACE}(?:\^|\*\*){_SPACE}(?:\{{([-+]?\d+)\}}|([-+]?\d+))"
_SCIENTIFIC = re.compile(rf"([-+]?{_DECIMAL})(?:[eE]([-+]?\d+)|{_POWER})?")
_POWER_OF_TEN = re.compile(rf"([-+]?)10{_SPACE}(?:\^|\*\*){_SPACE}(?:\{{([-+]?\d+)\}}|([-+]?\d+))")
_WHOLE = rf"([-+]?)(?:({_INTEGER}){_SPACE})?"
_FRACTION = re.compile(
    rf"{_WHOLE}\\[dt]?frac{_SPACE}(?:\{{{_SPACE}([-+]?{_DECIMAL}){_SPACE}\}}|(\d))"
    rf"{_SPACE}(?:\{{{_SPACE}([-+]?{_DECIMAL}){_SPACE}\}}|(\d))"
)
_SLASH = re.compile(rf"([-+]?)(?:({_INTEGER})\s+)??({_DECIMAL})()\s*/\s*([-+]?{_DECIMAL})()")
_DRESS = re.compile(r"\\?\$|\\left|\\right|\\displaystyle")


def as_number(text: str) -> Fraction | None:
    r"""The exact value; None of what is no single number.

    Integers with thousands separated by `,`, `{,}`, `\,` or a space; decimals; `1e3` and `1 \times 10^3`; fractions and
    mixed numbers with `/` or `\frac`; with a sign, dollars and LaTeX's spaces around them. Digits of any script.
    """
    if len(text) > _LONGEST:
        return None
    bare = _DRESS.sub("", text).replace("\u2212", "-").strip()
    bare = re.sub(r"^([-+])\s+", r"\1", bare)
    if found := _SCIENTIFIC.fullmatch(bare):
        return _scaled(_decimal(found[1]), found[2] or found[3] or found[4] or "0")
    if found := _POWER_OF_TEN.fullmatch(bare):
        value = _scaled(Fraction(1), found[2] or found[3])
        return None if value is None else -value if found[1] == "-" else value
    for form in (_FRACTION, _SLASH):
        if found := form.fullmatch(bare):
            return _fraction(found[1], found[2], found[3] or found[4], found[5] or found[6])
    return None


def same_number(one: str, other: str) -> bool | None:
    """Whether both are the same number; None where one of them is no number."""
    values = as_number(one), as_number(other)
    return None if None in values else values[0] == values[1]


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[^-+\d.]", "", text).rstrip("."))


def _scaled(value: Fraction, exponent: str) -> Fraction | None:
    """Value times 10 to the exponent; None where that would have too many digits to be an answer."""
    power = int(exponent)
    return value * Fraction(10) ** power if abs(power) <= _LARGEST_EXPONENT else None


def _fraction(sign: str, whole: str | None, above: str, below: str) -> Fraction | None:
    over, under = _decimal(above), _decimal(below)
    if not under or (whole and (over < 0 or under < 0)):
        return None
    value = over / under + (_decimal(whole) if whole else 0)
    return -value if sign == "-" else value
