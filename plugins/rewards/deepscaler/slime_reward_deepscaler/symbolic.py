r"""Whether two answers are equal as sympy expressions; what would not fit in memory is not evaluated.

Nothing is passed to Python's `eval` (sympy's own `sympify` does that); LaTeX goes through latex2sympy2_extended's
grammar, so an answer cannot run code.
"""

from __future__ import annotations

import re

import sympy
from latex2sympy2_extended import latex2sympy
from slime_reward_math import explodes

MAX_LENGTH = 200
"""Longer answers are compared as spelt only."""

_SYNTAX = re.compile(r"[\w\\{}()\[\]+\-*/^.,!|<>=:_ ']+")


def equal_expressions(given: str, expected: str) -> bool:
    """True when the difference simplifies to zero; False for what does not parse, or could grow without bound."""
    if not all(_tractable(text) for text in (given, expected)):
        return False
    try:
        difference = latex2sympy(given) - latex2sympy(expected)
        return bool(sympy.simplify(difference) == 0)
    except RecursionError:
        return False
    except Exception:  # whatever a parser or sympy makes of a model's text, it is not the label
        return False


def _tractable(text: str) -> bool:
    return len(text) <= MAX_LENGTH and bool(_SYNTAX.fullmatch(text)) and not explodes(text)
