"""Convert given flags to values of Megatron's fields.

`flags.py` uses the types, `layout.py`, `architecture.py` and `config.py` use the values. A flag that was not given is
not an attribute of `args`; None means "not given".
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from typing import Any

from slime_core.config.spec import flag_specs
from slime_core.protocols import Args
from slime_trainer_megatron.arguments.fields import known_fields


def given(args: Args, name: str) -> Any:
    """Return the given value of a Megatron flag; None if not given, even though `args.NAME` returns Megatron's default.

    Args:
        args: The run's settings.
        name: Attribute that is not one of slime's own settings.
    """
    return (args.model_extra or {}).get(name)


def given_fields(args: Args) -> dict[str, Any]:
    """Return field -> value for every given flag that is a field, without slime's own settings."""
    found = {name: given(args, name) for name in known_fields().fields if name not in flag_specs()}
    found = {name: value for name, value in found.items() if value is not None}
    if given(args, "use_flash_attn") and "attention_backend" not in found:
        found["attention_backend"] = "flash"
    return found


def layers_of(one: Callable[[str], Any] | None) -> Callable[[str], Any] | None:
    """Return the type of a flag that takes one value of a type, or a list for the layers."""

    def read(text: str) -> Any:
        assert one is not None
        try:
            return one(text)
        except ValueError:
            return pattern(text)

    return read if one is not None else None


def pattern(text: str) -> list[int]:
    """Parse a layer pattern as in Megatron's scripts: `[0]*3+[1]*58`, `([1]*3+[0])*12`.

    Raises:
        ArgumentTypeError: The text is not such a pattern.
    """
    try:
        found = _pattern(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a list such as [0]*3+[1]*58")
    return found


def _pattern(node: ast.expr) -> Any:
    """Evaluate lists of integers, sums of lists, and lists times a number; return None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
    if isinstance(node, ast.List | ast.Tuple):
        values = [_pattern(part) for part in node.elts]
        return values if all(isinstance(v, int) for v in values) else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _pattern(node.left), _pattern(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and right < 100_000:
        return left * right
    return None


def recompute_granularity(args: Args) -> str | None:
    """Return `--recompute-granularity`, or the equivalent of `--recompute-activations`."""
    return args.recompute_granularity or ("selective" if args.recompute_activations else None)
