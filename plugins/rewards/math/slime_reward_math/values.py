r"""Compare the values of two expressions with sympy, numerically at several points, with sufficient digits.

Texts must be in the form of `spelling.canonical`. Numbers are exact: `0.333` is 333/1000. Letters are real numbers,
except the constants `e`, `i` and `\pi`. Two expressions are equal if they agree at several points where both are real
functions of their letters. The number of digits follows from the texts (`size.digits`), so that different numbers
differ within these digits.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.function import AppliedUndef

from slime_reward_math.size import digits, explodes
from slime_reward_math.spelling import mixed_as_sums

LONGEST = 500
_POINTS = 6
_ENOUGH = 3
"""Number of points at which both expressions have a value."""
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_DEGREES = re.compile(r"\^\{\\circ\}")
_PRIMED = re.compile(r"\d'")
_BOUND = re.compile(r"\\(?:sum|prod)_\{i=")
_NOT_FINITE = (sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)


def equal_values(one: str, other: str) -> bool:
    """Return True if the values are equal; False also for texts that sympy cannot parse or feasibly evaluate."""
    fold = not (_has_both_cases(one) or _has_both_cases(other))
    given, expected = expression(one, fold), expression(other, fold)
    if given is None or expected is None:
        return False
    places = 50 + round(digits(one) + digits(other))
    try:
        if isinstance(given, sympy.MatrixBase) or isinstance(expected, sympy.MatrixBase):
            same_shape = getattr(given, "shape", None) == getattr(expected, "shape", ())
            return same_shape and all(_equal(a, b, places) for a, b in zip(given, expected))
        return _equal(given, expected, places)
    except Exception:  # whatever sympy makes of a model's expression
        return False


def proportional(one: str, other: str) -> int:
    """Return the sign of the number that `one` is of `other`; 0 when their quotient is no number."""
    given, expected = expression(one, False), expression(other, False)
    if not isinstance(given, sympy.Expr) or not isinstance(expected, sympy.Expr):
        return 0
    try:
        found = [a / b for a, b in _pairs(given, expected, 60) if b != 0]
        near = abs(found[0]) * sympy.Float("1e-40", 50) if len(found) >= _ENOUGH else 0
        return int(sympy.sign(found[0])) if near and all(abs(value - found[0]) <= near for value in found) else 0
    except Exception:  # whatever sympy makes of a model's expression
        return 0


def nearly_equal(one: str, other: str) -> bool:
    """Return True if both are numbers that differ by less than a hundredth, as a number and its rounded value do."""
    if not (is_closed(one) and is_closed(other)):
        return False
    given, expected = (expression(text, False).evalf(30) for text in (one, other))
    return bool(abs(given - expected) <= abs(given) * sympy.Rational(1, 100))


def is_closed(text: str) -> bool:
    """Return True for an expression without letters, which is a number."""
    found = expression(text, False)
    return isinstance(found, sympy.Expr) and not found.free_symbols


@functools.lru_cache(maxsize=4096)
def expression(text: str, fold: bool) -> Any:
    """Parse a text to a sympy expression or matrix; None if it is neither. `fold`: capitals become small letters."""
    if len(text) > LONGEST or explodes(text) or _PRIMED.search(text):
        return None
    text = mixed_as_sums(_DEGREES.sub(r"\\cdot\\frac{\\pi}{180}", text))
    text = _DECIMAL.sub(lambda m: f"(\\frac{{{int(m[1] + m[2])}}}{{1{'0' * len(m[2])}}})", text)
    try:
        found = latex2sympy(
            text,
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=fold),
        )
        return _prepared(found, text)
    except Exception:  # whatever a grammar or sympy makes of a model's text
        return None


def _prepared(found: Any, text: str) -> Any:
    if isinstance(found, sympy.MatrixBase):
        return sympy.ImmutableMatrix(found.applyfunc(lambda part: _prepared(part, text)))
    if not isinstance(found, sympy.Expr):
        return None
    found = found.doit()
    found = found.subs({call: sympy.Symbol(str(call), real=True) for call in found.atoms(AppliedUndef)})
    imaginary = sympy.Symbol("i", real=True)
    if imaginary in found.free_symbols and not _BOUND.search(text):
        return found.subs(imaginary, sympy.I)
    return sympy.real_root(found)


def _has_both_cases(text: str) -> bool:
    letters = set(re.sub(r"\\[A-Za-z]+", "", text))
    return any(letter.upper() in letters for letter in letters if letter.islower())


def _equal(one: Any, other: Any, places: int) -> bool:
    if one == other:
        return True
    if one in _NOT_FINITE or other in _NOT_FINITE:
        return False
    left = min(_ENOUGH, len(_points(one, other)))
    for given, expected in _pairs(one, other, places):
        if abs(given - expected) > max(abs(given), abs(expected), 1) * sympy.Float(10) ** (10 - places):
            return False
        left -= 1
        if not left:
            return True
    return False


def _pairs(one: Any, other: Any, places: int) -> Iterator[tuple[Any, Any]]:
    """Yield the values of both expressions at points where both have a value."""
    for point in _points(one, other):
        given, expected = _at(one, point, places), _at(other, point, places)
        if given is not None and expected is not None:
            yield given, expected


def _points(one: sympy.Expr, other: sympy.Expr) -> list[dict[Any, Any]]:
    """Return points, values for the letters of both expressions, always the same."""
    letters = sorted(one.free_symbols | other.free_symbols, key=str)
    if not letters:
        return [{}]
    chance = random.Random(20)
    points = []
    for number in range(_POINTS):
        sign = -1 if number % 2 else 1
        points.append(
            {
                x: sympy.Rational(sign**k * chance.randint(3, 40), chance.randint(7, 17))
                for k, x in enumerate(letters, 1)
            }
        )
    return points


def _at(found: Any, point: dict[Any, Any], places: int) -> Any:
    """Return the value at a point with `places` digits, or None if the function has no real value."""
    if point and any(_leaves_the_reals(part, point) for part in found.atoms(sympy.Pow, sympy.log)):
        return None
    value = found.subs(point).evalf(places, maxn=2 * places)
    if not value.is_number or not value.is_finite or value.has(*_NOT_FINITE):
        return None
    return value if all(part.is_Number for part in value.as_real_imag()) else None


def _leaves_the_reals(part: Any, point: dict[Any, Any]) -> bool:
    inner = part.args[0]
    if not inner.free_symbols or (isinstance(part, sympy.Pow) and part.exp.is_integer):
        return False
    value = inner.subs(point).evalf()
    return bool(value.is_real and value < 0)
