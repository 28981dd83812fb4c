"""Arithmetic in text -> its value in text.

Nothing is executed: the syntax tree is walked, and only numbers and operators pass. Sizes are bounded, so that no
expression a model writes can take long.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

Number = int | float

MAX_LENGTH = 200
_MAX_BITS = 4000
_MAX_EXPONENT = 1000

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """The value of `expression`, or `error: ...`: what went wrong is for the model to read."""
    if len(expression) > MAX_LENGTH:
        return f"error: longer than {MAX_LENGTH} characters"
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not arithmetic"
    try:
        value = _evaluate(tree.body)
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return "error: number too large"
    except ValueError as error:
        return f"error: {error}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


def _evaluate(node: ast.expr) -> Number:
    value: Number | complex
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_evaluate(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _MAX_EXPONENT:
            raise ValueError("exponent too large")
        value = _BINARY[type(node.op)](left, right)
    else:
        raise ValueError("only numbers and + - * / // % ** ( ) are allowed")
    if isinstance(value, complex):
        raise ValueError("no real value")
    if value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value):
        raise ValueError("number too large")
    return value


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **.
    """
    return calculate(expression)
