"""Write the list of megatron-core's fields that slime ships; `--check` only says whether it is up to date.

python scripts/snapshot_megatron_flags.py [--check]

The fields are those of the installed megatron-core's configuration classes, in their order; one that two of a family
have is listed once, where it comes first. A field whose type cannot be typed on a command line (functions, process
groups, dtypes) is no flag and is not listed.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from slime_trainer_megatron.arguments.fields import SNAPSHOT, ConfigField, Scalar, Shape

_SCALARS: dict[type, Scalar] = {bool: "bool", int: "int", float: "float", str: "str"}
_Typed = tuple[Scalar, Shape, tuple[Any, ...]]


def snapshot() -> str:
    """Return the text of `SNAPSHOT`, one field per line."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.package_info import __version__
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    owners: dict[type, str] = {
        ModelParallelConfig: "transformer", TransformerConfig: "transformer", MLATransformerConfig: "mla",
        OptimizerConfig: "optimizer", DistributedDataParallelConfig: "ddp",
    }  # fmt: skip
    found: dict[str, ConfigField] = {}
    for kind, owner in owners.items():
        for row in _fields(kind, owner):
            first = found.setdefault(row.name, row)
            also = () if owner == "mla" else row.owners
            found[row.name] = dataclasses.replace(
                first, owners=tuple(dict.fromkeys((*first.owners, *also))), names=first.names or row.names,
                help=first.help or row.help,
            )  # fmt: skip
    usual = {"shape": "one", "choices": (), "names": (), "default": None, "help": ""}
    rows = (
        json.dumps({k: v for k, v in vars(row).items() if k not in usual or v != usual[k]}, separators=(",", ":"))
        for row in found.values()
    )
    return '{"version":' + json.dumps(__version__) + ',\n"fields":[\n' + ",\n".join(rows) + "\n]}\n"


def _fields(kind: type, owner: str) -> Iterator[ConfigField]:
    """Yield the fields that the class itself defines."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    hints, docs = typing.get_type_hints(kind), _docstrings(kind)
    for name in kind.__annotations__:
        typed = _type(hints[name])
        if name.startswith("_") or typed is None:
            continue
        field, (scalar, shape, choices) = known[name], typed
        default: Any = [] if field.default_factory is not dataclasses.MISSING else field.default
        if isinstance(default, enum.Enum):
            default = default.name
        names = field.metadata.get("argparse_meta", {}).get("arg_names", ())
        yield ConfigField(
            name, (owner,), scalar, shape, choices, tuple(word.removeprefix("--") for word in names),
            None if default is dataclasses.MISSING else default, docs.get(name, ""),
        )  # fmt: skip


def _docstrings(kind: type) -> dict[str, str]:
    """Return attribute -> its docstring, in one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        line.target.id: " ".join(inspect.cleandoc(after.value.value).split())
        for line, after in zip(tree.body, tree.body[1:])
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


def _type(hint: Any) -> _Typed | None:
    """Return the command-line type of an annotation, or None if no value can be typed."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint], "one", ()
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "str", "one", tuple(hint.__members__)
    if origin is typing.Literal:
        return "str", "one", parts
    if origin in (list, tuple):
        first = _type(parts[0])
        return None if first is None else (first[0], "list", first[2])
    if origin not in (typing.Union, types.UnionType):
        return None
    typed = [option for option in map(_type, parts) if option is not None]
    if not typed:
        return None
    scalar, shape, choices = typed[0]
    shapes = {option[1] for option in typed}
    return scalar, (shape if len(shapes) == 1 else "either"), (choices if len(typed) == 1 else ())


def main(argv: list[str]) -> int:
    """Write or check; 1 when the list is out of date."""
    text = snapshot()
    if "--check" not in argv:
        SNAPSHOT.write_text(text, encoding="utf-8")
        return 0
    if not SNAPSHOT.exists() or SNAPSHOT.read_text(encoding="utf-8") != text:
        print(f"{SNAPSHOT} is out of date; run python scripts/snapshot_megatron_flags.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
