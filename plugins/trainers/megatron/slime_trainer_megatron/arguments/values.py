"""Flags as they were given -> values of Megatron's fields.

Called by `flags.py` for errors before anything starts, and by `layout.py`, `architecture.py` and `config.py` for the
values. What a reader would get wrong: a flag that was not given is no attribute of `args`, and None is "not given".
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_trainer_megatron.arguments.fields import ConfigField, known_fields

_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str, int, float),
    "bool": (bool,),
}


def given(args: Args, name: str) -> Any:
    """What a flag was given; None where it was not, although `args.NAME` then answers with Megatron's default.

    Args:
        args: The run's settings.
        name: Attribute that is no setting of slime's own.
    """
    return (args.model_extra or {}).get(name)


def given_fields(args: Args) -> dict[str, Any]:
    """Field -> value of every flag that was given and is a field; slime's own settings are not among them.

    Raises:
        ConfigError: A value that the field cannot have.
    """
    found = {name: given(args, name) for name in known_fields().fields if name not in flag_specs()}
    found = {name: value for name, value in found.items() if value is not None}
    if given(args, "use_flash_attn") and "attention_backend" not in found:
        found["attention_backend"] = "flash"
    return check_values(found, {})


def check_values(given: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    """The fields among `given`, each as its type. Raises ConfigError with every value that has another."""
    fields, values, problems = known_fields().fields, dict[str, Any](), list[str]()
    for name, value in given.items():
        if name not in fields or value is None:
            continue
        try:
            values[name] = _typed(fields[name], value)
        except ValueError as error:
            where = f" ({origins[name]})" if name in origins else ""
            problems.append(f"--{name.replace('_', '-')} {value!r}{where}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def _typed(field: ConfigField, value: Any) -> Any:
    if field.shape == "either" and isinstance(value, str) and field.kind != "str":
        value = pattern(value)
    values = list(value) if isinstance(value, list | tuple) else [value]
    allowed = _TYPES[field.kind]
    if any(not isinstance(v, allowed) or isinstance(v, bool) != (field.kind == "bool") for v in values):
        words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
        raise ValueError(f"expected {words[field.kind]}" + ("" if field.shape == "one" else " or a list"))
    if field.kind == "str":
        values = [str(v) for v in values]
    if field.shape == "one" and isinstance(value, list | tuple):
        raise ValueError("expected one value")
    return values if isinstance(value, list | tuple) else values[0]


def pattern(text: str) -> int | float | list[int]:
    """A number, or a list as Megatron's scripts write one for layers: `[0]*3+[1]*58`, `([1]*3+[0])*12`.

    Raises:
        ValueError: It is neither.
    """
    try:
        found: int | float | list[int] | None = _pattern(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError):
        found = None
    if found is None:
        raise ValueError("expected a number, or a list such as [0]*3+[1]*58")
    return found


def _pattern(node: ast.expr) -> Any:
    """Lists of whole numbers, sums of lists, and lists times a number; None for anything else."""
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
    """`--recompute-granularity`, or what `--recompute-activations` stands for."""
    return args.recompute_granularity or ("selective" if args.recompute_activations else None)
