r"""Bound the digits that the exact value of an expression could need, from its text; `explodes` refuses large ones.

`math` and `deepscaler` check a model's answer before they pass it to sympy, since the interpreter's big-integer code
cannot be interrupted. Letters count as 1, e and pi by value, minus as plus, division by a whole number not at all: an
upper bound for answers that people write. Exponents of separate factors do not multiply, nested exponents do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

MOST_DIGITS = 10_000
"""Maximum digits of one power."""
LARGEST_FACTORIAL = 1_000

_MAY_BE_SMALL = re.compile(r"[-/.^]|\*\*|frac|div|exp|\de")
_DEEPEST = 50
_TOKEN = re.compile(r"\*\*|(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\\[A-Za-z]+|\\.|[A-Za-z]+|\S")
_CLOSING = {"{": "}", "(": ")", "[": "]"}
_WRAPPING = ("\\left", "\\right", "\\displaystyle", "\\big", "\\Big", "\\,", "\\!", "\\;", "\\ ")
_WORTH = {"e": math.log10(math.e), "\\pi": math.log10(math.pi)}


class _TooLarge(Exception):
    pass


def explodes(expression: str) -> bool:
    """True when a power has more than `MOST_DIGITS` digits, or a factorial or binomial is of more than 1,000."""
    try:
        _read(expression)
    except _TooLarge:
        return True
    return False


def digits(expression: str) -> float:
    """Return the digits that distinguish the value of an expression from all others of its size; at most 20,000."""
    reader = _read(expression)
    return min(reader.seen, 20_000.0) + len(expression)


def _read(expression: str) -> _Reader:
    """Return a reader that has read the whole expression. Raises _TooLarge."""
    reader = _Reader([token for token in _TOKEN.findall(expression) if token not in _WRAPPING])
    while reader.peek():
        reader.sum()
        reader.take()  # a closing bracket without an opening one
    return reader


class _Reader:
    """A recursive-descent parser; each method returns the decimal logarithm of the value it has read, at least 0."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = self.depth = 0
        self.seen = 0.0
        """Sum of the logarithms of all powers."""

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.position += 1
        return token

    def sum(self) -> float:
        total = factors = 0.0
        while (token := self.peek()) and token not in _CLOSING.values():
            if token in "+-=,<>":
                self.take()
                total, factors = _added(total, factors), 0.0
            elif token in ("/", "*", "\\cdot", "\\times", "\\div"):
                self.take()
                factors += self.divisor(self.power) if token in ("/", "\\div") else self.power()
            else:
                factors += self.power()
        return _added(total, factors) if total else factors

    def power(self) -> float:
        """Read an atom with all its factorials and exponents; `9^9^9` is `9^(9^9)`."""
        value = self._power()
        self.seen += value
        return value

    def _power(self) -> float:
        value = self.factorials(self.atom())
        if self.peek() not in ("^", "**"):
            return value
        self.take()
        while self.peek() in "+-" and self.peek():
            self.take()
        exponent = 10 ** min(self.power(), 9.0)
        if max(1.0, value) * exponent > MOST_DIGITS:
            raise _TooLarge
        return self.factorials(value * exponent)

    def factorials(self, value: float) -> float:
        while self.peek() == "!":
            self.take()
            value = _factorial(value)
        return value

    def atom(self) -> float:
        token = self.take()
        if token in _CLOSING:
            self.depth += 1
            if self.depth > _DEEPEST:
                raise _TooLarge
            value = self.sum()
            self.depth -= 1
            self.take()
            return value
        if token[:1].isdecimal() or token[:1] == ".":
            if (value := _logarithm(token)) > MOST_DIGITS:
                raise _TooLarge
            return value
        if token in ("\\frac", "\\dfrac", "\\tfrac"):
            return self.atom() + self.divisor(self.atom)
        if token in ("\\binom", "\\dbinom", "\\tbinom", "\\Gamma"):
            value = _factorial(self.atom())
            return value if token == "\\Gamma" else max(value, self.atom())
        if token == "\\exp":
            exponent = 10 ** min(self.power(), 9.0)
            if exponent > MOST_DIGITS:
                raise _TooLarge
            return exponent * _WORTH["e"]
        while len(token) > 2 and token[0] == "\\" and self.peek() == "[":
            self.atom()
        if len(token) > 2 and token[0] == "\\" and self.peek() == "{":
            return self.atom()
        return _WORTH.get(token, 0.0)

    def divisor(self, read: Callable[[], float]) -> float:
        """Return how many digits a division by the read value can add: 0 for whole numbers, else its digits at most."""
        start = self.position
        value = read()
        inside = self.tokens[start : self.position]
        if not any(_MAY_BE_SMALL.search(token) for token in inside):
            return 0.0
        return value + sum(len(token) for token in inside if any(character.isdecimal() for character in token))


def _factorial(value: float) -> float:
    if value > math.log10(LARGEST_FACTORIAL):
        raise _TooLarge
    return math.lgamma(10**value + 1) / math.log(10)


def _added(one: float, other: float) -> float:
    high, low = max(one, other), min(one, other)
    return high + math.log10(1 + 10 ** (low - high))


def _logarithm(number: str) -> float:
    digits, _, power = number.lower().replace(",", "").partition("e")
    whole = digits.lstrip("0").partition(".")[0]
    exponent = float(power[:9] or 0)
    return max(0.0, exponent + len(whole[15:]) + (math.log10(float(whole[:15])) if whole else 0.0))
