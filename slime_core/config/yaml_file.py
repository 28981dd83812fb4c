"""A YAML file -> keys with values and line numbers, so that every error message can name file:line.

Scalars follow the YAML 1.2 core schema: `1e-6` is a number and `no` is a string, unlike PyYAML's default. This reader
reads the output of `dump_value` back unchanged. Paths in a file are relative to the file: `spec` knows which settings
are paths, and `rebase`, `rebase_spec` and `rebase_marked` make them relative to the working directory.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from slime_core.errors import ConfigError

_CORE_TAGS = [f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")]


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 numbers and booleans; repeated keys and other tags are errors."""

    yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (*_CORE_TAGS, None)}  # noqa: RUF012
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own way

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except ConfigError:
            raise
        except (ValueError, KeyError):  # raised for an explicit tag such as `!!int x`
            tag = node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"{node.value!r} is not of type {tag}", node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool):
                raise _at(self.name, key_node, f"{key!r} cannot be a key")
            if key in seen:
                raise _at(self.name, key_node, f"{key!r} is already set in line {seen[key]}")
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=True)


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def _construct_int(loader: _CoreLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))  # 010 is 10


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


@dataclass(frozen=True)
class Item:
    """A top-level entry of a file."""

    value: Any
    where: str
    """ "file:line"."""
    directory: str = ""
    """Directory of the file; empty for the working directory."""


def _at(name: str, node: yaml.Node, message: str) -> ConfigError:
    return ConfigError(f"{name}:{node.start_mark.line + 1}: {message}")


@dataclass(frozen=True)
class Document:
    """A file's content, and the line of each of its entries."""

    name: str
    value: Any
    node: yaml.Node | None

    def where(self, *keys: object) -> str:
        """Return "file:line" of the entry that `keys`, of mappings and lists, lead to; unknown keys are left out."""
        node, line = self.node, 0 if self.node is None else self.node.start_mark.line
        for key in keys:
            if isinstance(node, yaml.SequenceNode):
                node = node.value[key]
                line = node.start_mark.line
            for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
                if name.value == str(key):
                    node, line = value, name.start_mark.line
                    break
        return f"{self.name}:{line + 1}"

    def items(self, *keys: Any, expected: str = "`name: value` lines") -> dict[str, Item]:
        """Return the entries of the mapping that `keys` lead to, none of an empty one. Raises ConfigError."""
        value = self.value
        for key in keys:
            value = value[key]
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where(*keys)}: expected {expected}")
        directory = os.path.dirname(self.name)
        return {str(key): Item(inner, self.where(*keys, key), directory) for key, inner in value.items()}


def read_yaml(path: str | Path, cited: str = "") -> dict[str, Item]:
    """Read the top-level keys of a mapping file. Raises ConfigError naming file and line."""
    return read_document(path, cited).items()


def read_document(path: str | Path, cited: str = "") -> Document:
    """Parse one file. Raises ConfigError.

    Args:
        path: The file.
        cited: Name of the file in error messages, e.g. `--config 'run.yaml' (flag)`; the path by default.
    """
    name = str(path)
    cited = cited or name
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{cited}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{cited}: cannot be read: {error}") from error
    try:
        loader = _CoreLoader(text)
        loader.name = name
        node = loader.get_single_node()
        return Document(name, None if node is None else loader.construct_object(node, deep=True), node)
    except (yaml.YAMLError, RecursionError) as error:
        raise _invalid(name, text, error) from error


def _invalid(name: str, text: str, error: Exception) -> ConfigError:
    """Return the parser's error as a ConfigError with file and line."""
    line, problem = 1, str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = error.problem or problem
    elif isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        problem = error.reason
    return ConfigError(f"{name}:{line}: not valid YAML: {problem}")


def rebase(directory: str, path: str) -> str:
    """Make a path relative to `directory` relative to the working directory; absolute paths, `~`, `hf:`, URLs stay."""
    if not directory or not path or path.startswith(("~", "hf:")) or "://" in path:
        return path
    return os.path.normpath(os.path.join(directory, path))


def rebase_spec(directory: str, spec: str) -> str:
    """Rebase `file.py` and `file.py:name`; any other component name stays."""
    return rebase(directory, spec) if _CODE.fullmatch(spec) else spec


def rebase_marked(directory: str, value: object) -> object:
    """Rebase strings that begin with `./` or `../`, at any depth, in a value that is no typed setting."""
    if isinstance(value, dict):
        return {key: rebase_marked(directory, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rebase_marked(directory, inner) for inner in value]
    if not directory or not isinstance(value, str) or not value.startswith(("./", "../")):
        return value
    path = rebase(directory, value)
    return path if os.path.isabs(path) or path.startswith("../") else os.path.join(".", path)  # still marked


def read_scalar(text: str) -> object:
    """Parse a command-line value, e.g. of `--set`, as YAML. Raises ValueError."""
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not a YAML value: {text!r}") from error


_CODE = re.compile(r".+\.py(?::[A-Za-z_][\w.]*)?")
"""A component given as a file, the same form as in `plugins.resolve`."""
_UNSAFE = re.compile("[^ -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""Characters YAML forbids or takes for line ends inside quotes."""
_PLAIN = re.compile(r"^[A-Za-z_./][A-Za-z0-9_./-]*$")


def _quoted(text: str) -> str:
    """Return a double-quoted scalar; JSON escapes are valid in YAML."""
    return _UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(text, ensure_ascii=False))


def dump_value(value: object) -> str:
    """Format `value` on one line for `read_yaml`: JSON, with plain words left unquoted."""
    if isinstance(value, str):
        plain = _PLAIN.match(value) and read_scalar(value) == value
        return value if plain else _quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    if isinstance(value, dict):
        pairs = (
            f"{dump_value(k) if isinstance(k, int | float) else _quoted(str(k))}: {dump_value(v)}"
            for k, v in value.items()
        )
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(dump_value(v) for v in value) + "]"
    return json.dumps(value)
