"""The fields of megatron-core's configuration classes, read from its source text: nothing of it is imported.

Called by `flags.py` when a flag is looked up, and by `config.py`, which must know where a flag's value goes. So an
option of a new Megatron appears here by itself. Without megatron-core the list that slime ships stands in, so that
settings are checked on a machine that only prepares runs. A field whose type cannot be typed on a command line
(functions, process groups, dtypes) is no flag and is not listed.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from slime_core.errors import ConfigError

SNAPSHOT = Path(__file__).resolve().parent / "fields_snapshot.json"
"""Written by scripts/snapshot_megatron_flags.py."""

CLASSES: Mapping[str, tuple[str, ...]] = {
    "model_parallel_config.py": ("ModelParallelConfig",),
    "transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
    "optimizer/optimizer_config.py": ("OptimizerConfig",),
    "distributed/distributed_data_parallel_config.py": ("DistributedDataParallelConfig",),
}
"""File below megatron/core -> classes; a field that two of a family have is listed once, where it comes first."""
_ENUMS = "transformer/enums.py"
_FAMILY = {"OptimizerConfig": "optimizer", "DistributedDataParallelConfig": "ddp"}

Scalar = Literal["bool", "int", "float", "str"]
Shape = Literal["one", "list", "either"]
"""either: one value or a list of them."""


@dataclass(frozen=True)
class ConfigField:
    """One field that can be a flag."""

    name: str
    owners: tuple[str, ...]
    """Which configurations have it: "transformer", "mla" (multi-latent attention's alone), "optimizer", "ddp"."""
    kind: Scalar
    shape: Shape = "one"
    choices: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    """Flags (without dashes) that Megatron has for it instead of the field's own name."""
    default: Any = None
    help: str = ""


@dataclass(frozen=True)
class FieldList:
    """The fields of one megatron-core."""

    fields: Mapping[str, ConfigField]
    version: str
    """For messages, such as "megatron-core 0.16.1"."""


@cache
def known_fields() -> FieldList:
    """Those of the installed megatron-core, or of the one slime was tested with. Raises ConfigError."""
    root = core_directory()
    return shipped_fields() if root is None else read_fields(root)


def core_directory() -> Path | None:
    """Where megatron/core is installed; None without it."""
    # `megatron` is a namespace package or an empty one: finding a module below it runs nothing of Megatron's.
    found = importlib.util.find_spec("megatron")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (Path(folder) / "core" / next(iter(CLASSES))).is_file():
            return Path(folder) / "core"
    return None


def shipped_fields() -> FieldList:
    """The list in slime's own distribution."""
    stored = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    rows = (_from_json(row) for row in stored["fields"])
    note = "slime's own list, as no megatron-core is installed here"
    return FieldList({row.name: row for row in rows}, f"megatron-core {stored['version']} ({note})")


def read_fields(root: Path) -> FieldList:
    """Parse the sources below a `megatron/core`. Raises ConfigError when they are not what they were."""
    enums = _enums(_tree(root / _ENUMS))
    found: dict[str, ConfigField] = {}
    for file, classes in CLASSES.items():
        bodies = {node.name: node for node in _tree(root / file).body if isinstance(node, ast.ClassDef)}
        for name in classes:
            if name not in bodies:
                raise ConfigError(f"{root / file}: no class {name}; this megatron-core is none slime knows")
            for row in _class_fields(bodies[name], enums):
                found[row.name] = _merged(found.get(row.name), row)
    return FieldList(found, f"megatron-core {core_version(root)}")


def core_version(root: Path) -> str:
    """As its package_info.py says."""
    numbers = {
        target.id: node.value.value
        for node in _tree(root / "package_info.py").body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return ".".join(str(numbers.get(key, "?")) for key in ("MAJOR", "MINOR", "PATCH")) + str(
        numbers.get("PRE_RELEASE", "")
    )


def to_json(fields: FieldList, version: str) -> str:
    """The text of `SNAPSHOT`, one field a line."""
    usual = {"shape": "one", "choices": (), "names": (), "default": None, "help": ""}
    rows = (
        json.dumps({k: v for k, v in asdict(row).items() if k not in usual or v != usual[k]}, separators=(",", ":"))
        for row in fields.fields.values()
    )
    return '{"version":' + json.dumps(version) + ',\n"fields":[\n' + ",\n".join(rows) + "\n]}\n"


def _from_json(row: Mapping[str, Any]) -> ConfigField:
    values: dict[str, Any] = {k: tuple(v) if k in ("owners", "choices", "names") else v for k, v in row.items()}
    return ConfigField(**values)


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"{file}: megatron-core's flags cannot be read from it: {error}") from error


def _enums(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Class -> names of its members."""
    return {
        node.name: tuple(
            target.id
            for line in node.body
            if isinstance(line, ast.Assign)
            for target in line.targets
            if isinstance(target, ast.Name)
        )
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _merged(first: ConfigField | None, second: ConfigField) -> ConfigField:
    """A field that several configurations have is one flag; the first one's words stay."""
    if first is None:
        return second
    owners = first.owners
    if second.owners != ("mla",):
        owners = tuple(dict.fromkeys((*owners, *second.owners)))
    return ConfigField(
        first.name, owners, first.kind, first.shape, first.choices, first.names or second.names, first.default,
        first.help or second.help,
    )  # fmt: skip


def _class_fields(node: ast.ClassDef, enums: Mapping[str, tuple[str, ...]]) -> Iterator[ConfigField]:
    owner = _FAMILY.get(node.name, "mla" if node.name.startswith("MLA") else "transformer")
    for line, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        name, typed = line.target.id, _type(line.annotation, enums)
        if name.startswith("_") or typed is None:
            continue
        kind, shape, choices = typed
        default, names = _default(line.value)
        yield ConfigField(name, (owner,), kind, shape, choices, names, default, _docstring(after))


def _docstring(node: ast.stmt | None) -> str:
    """The text under an attribute, in one line."""
    text = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
        return ""
    return " ".join(inspect.cleandoc(text.value).split())


_SCALARS: Mapping[str, Scalar] = {"bool": "bool", "int": "int", "float": "float", "str": "str"}
_Typed = tuple[Scalar, Shape, tuple[Any, ...]]


def _type(node: ast.expr, enums: Mapping[str, tuple[str, ...]]) -> _Typed | None:
    """What an annotation allows of what can be typed on a command line; None for nothing."""
    if isinstance(node, ast.Name):
        if node.id in enums:
            return "str", "one", enums[node.id]
        return (_SCALARS[node.id], "one", ()) if node.id in _SCALARS else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _either([_type(part, enums) for part in (node.left, node.right)])
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return None
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if node.value.id == "Literal":
        values = tuple(part.value for part in parts if isinstance(part, ast.Constant))
        return "str", "one", values
    typed = [_type(part, enums) for part in parts]
    if node.value.id in ("List", "list", "Tuple", "tuple"):
        return (typed[0][0], "list", typed[0][2]) if typed[0] is not None else None
    return _either(typed) if node.value.id in ("Optional", "Union") else None


def _either(options: list[_Typed | None]) -> _Typed | None:
    """A union: its first type, as one value, a list or both."""
    typed = [option for option in options if option is not None]
    if not typed:
        return None
    kind, shape, choices = typed[0]
    shapes = {option[1] for option in typed}
    return kind, (shape if len(shapes) == 1 else "either"), (choices if len(typed) == 1 else ())


def _default(node: ast.expr | None) -> tuple[Any, tuple[str, ...]]:
    """Default value, and the names that `argparse_meta` gives the flag."""
    if not isinstance(node, ast.Call):
        return _value(node), ()
    words = {word.arg: word.value for word in node.keywords if word.arg}
    names: tuple[str, ...] = ()
    metadata = _value(words.get("metadata"))
    if isinstance(metadata, dict):
        names = tuple(name.removeprefix("--") for name in metadata.get("argparse_meta", {}).get("arg_names", ()))
    return ([] if "default_factory" in words else _value(words.get("default"))), names


def _value(node: ast.expr | None) -> Any:
    """A literal, arithmetic on numbers, or the name of an enum's member; None for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            return None
        if isinstance(node.op, ast.Mult):
            return left * right
        return left**right if isinstance(node.op, ast.Pow) else None
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None
