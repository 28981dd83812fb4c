r"""Read labels and the content of boxes, and compare numbers.

Rewards that grade mathematics ask `same_number` before they compare spellings or expressions, so that no two of them
disagree on it: `1,000`, `1e3`, `\frac{2000}{2}` and `10^3` are one number. Values are exact, so 0.333 is not 1/3. A
percent sign makes a text no number, since graders differ on whether 50% is 50 or 0.5.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
from fractions import Fraction
from typing import Any

_FORMS = re.compile(r"""\s*(?:\[\s*["']|\{\s*")""")
"""Beginning of the text of a list of texts, or of a JSON object."""


def right_answers(label: Any, *, parses: bool = False) -> list[str]:
    """Return the texts of a label, any of which is right: a text, a number (42.0 is "42"), true or false, or a list.

    With `parses`, the text of a list of texts (`["34"]`, `['34']`) is that list, and the text of a JSON object is an
    error.

    Raises:
        ValueError: The label is missing, blank or not finite, or has another form.
    """
    answers = label
    if parses and isinstance(label, str) and (form := _FORMS.match(label)):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            answers = ast.literal_eval(label.strip()) if "[" in form[0] else None
    read = [_answer_text(answer) for answer in (answers if isinstance(answers, list | tuple) else [answers])]
    if not read or None in read:
        none = "no label (--label-key NAME names its column; metadata.rm_type gives a row without one another reward)"
        said = none if label is None else f"the label {label!r:.80}"
        raise ValueError(f"{said}: expected a text, a number, or a list of them of which any is right")
    return [text for text in read if text is not None]


def _answer_text(value: Any) -> str | None:
    if isinstance(value, float):
        value = int(value) if value.is_integer() else value if math.isfinite(value) else None
    return str(value) if isinstance(value, int | float) or (isinstance(value, str) and value.strip()) else None


# -- boxes -----------------------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_WITHOUT_BRACES = re.compile(r"([^$\n]+?)\s*(?:\$|\\[)\]])|(\S+)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, nested braces included; None if it never closes.

    Escaped braces (`\{`) are text: `\boxed{\{1, 2\}}` holds `\{1, 2\}`. A box without braces (`$\boxed 7$`) holds the
    rest of its formula, or the next word where no `$` ends it.
    """
    start = max((box.end() for box in _BOX.finditer(text)), default=0)
    if not start:
        return None
    if text[start : start + 1] != "{":
        bare = _WITHOUT_BRACES.match(text, start)
        return bare[1] or bare[2].rstrip(".,;:") if bare else None
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return text[start + 1 : found.start()]
    return None


# -- numbers ---------------------------------------------------------------------------------------------

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
    r"""Return the exact value of a text; None if it is not a single number.

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
    """Return whether both are the same number; None if one of them is not a number."""
    values = as_number(one), as_number(other)
    return None if None in values else values[0] == values[1]


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[^-+\d.]", "", text).rstrip("."))


def _scaled(value: Fraction, exponent: str) -> Fraction | None:
    """Return the value times 10 to the exponent; None if the result has too many digits to be an answer."""
    power = int(exponent)
    return value * Fraction(10) ** power if abs(power) <= _LARGEST_EXPONENT else None


def _fraction(sign: str, whole: str | None, above: str, below: str) -> Fraction | None:
    over, under = _decimal(above), _decimal(below)
    if not under or (whole and (over < 0 or under < 0)):
        return None
    value = over / under + (_decimal(whole) if whole else 0)
    return -value if sign == "-" else value
