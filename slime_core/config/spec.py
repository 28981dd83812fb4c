"""The schema as data: one `FlagSpec` per setting, built from `schema.SECTIONS`; used by flags, layers and docs.

`slime config show`, the argument parser, the environment reader and the generated reference all iterate over this list,
so adding a setting means adding an attribute to a section. Values keep the spelling of their source until pydantic
converts them; only lists and mappings given as one string are split here.
"""

from __future__ import annotations

import json
import os
import types
from dataclasses import dataclass
from functools import cache
from typing import Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from slime_core.config.schema import SECTIONS, Args
from slime_core.config.sections.base import Flag
from slime_core.config.yaml_file import rebase, rebase_marked, rebase_spec

Kind = Literal["bool", "int", "float", "str", "mapping"]


@dataclass(frozen=True)
class FlagSpec:
    """The spelling, type and help text of a setting."""

    name: str
    """Attribute name in `Args`."""
    section: str
    """Title of its group in the help text."""
    help: str
    kind: Kind
    """Type of the value, or of the elements of a list."""
    is_list: bool
    choices: tuple[str, ...]
    """Allowed strings; empty when any is allowed."""
    spelling: Flag
    default: object

    @property
    def flag(self) -> str:
        """Flag of the setting, `--attribute-name`; for a switch, the flag that stores True."""
        return "--" + (self.spelling.name or self.name.replace("_", "-"))

    @property
    def metavar(self) -> str:
        """Name of the value in the help text."""
        if self.spelling.metavar:
            return self.spelling.metavar
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        words = {"mapping": "JSON", "int": "N", "float": "X"}
        return words.get(self.kind, "PATH" if self.holds == "path" or self.name.endswith("_path") else "TEXT")

    @property
    def holds(self) -> str:
        """See `Flag.holds`."""
        return self.spelling.holds or ("spec" if self.name.endswith("_path") else "")

    @property
    def off_flag(self) -> str | None:
        """The flag that stores False, or None if the setting has no such flag."""
        if self.kind != "bool" or self.name.startswith("no_"):
            return None
        return f"--{self.spelling.off or 'no'}-{self.flag.removeprefix('--')}"

    def show(self, value: object) -> str:
        """Return `value` as it is spelled on the command line."""
        if self.kind == "bool" and isinstance(value, bool):
            return self.flag if value else (self.off_flag or f"{self.flag} off")
        if value is None:
            return f"{self.flag} not set"
        if self.is_list and isinstance(value, list):
            return " ".join([self.flag, *(_show_scalar(v) for v in value)])
        return f"{self.flag} {_show_scalar(value)}"

    def located(self, value: object, directory: str) -> object:
        """Return a value from a file in `directory`, with its paths made relative to the working directory."""
        if self.holds == "marked":
            return rebase_marked(directory, value)
        if isinstance(value, list):
            kept = 2 if self.holds == "pairs" and len(value) > 1 else 0  # a single path has no name before it
            return [v if kept and i % kept == 0 else self._located(v, directory) for i, v in enumerate(value)]
        return self._located(value, directory)

    def _located(self, value: object, directory: str) -> object:
        if not isinstance(value, str) or not self.holds:
            return value
        return rebase_spec(directory, value) if self.holds == "spec" else rebase(directory, value)

    def read(self, text: str) -> object:
        """Convert one string (environment, or a flag's value) to pydantic's input. Raises ValueError."""
        if self.kind == "mapping":
            return _read_mapping(text)
        if not self.is_list:
            return text
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [part for part in text.split(os.pathsep) if part] if self.spelling.paths else text.split()


def _show_scalar(value: object) -> str:
    if isinstance(value, dict):
        return "'" + json.dumps(value, ensure_ascii=False) + "'"
    return repr(value)


def _read_mapping(text: str) -> dict[str, object]:
    """Parse a JSON object. Raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _strip_optional(annotation: object) -> object:
    while True:
        origin = get_origin(annotation)
        if origin in (Union, types.UnionType):
            annotation = next(a for a in get_args(annotation) if a is not type(None))
        elif origin is not None and hasattr(annotation, "__metadata__"):
            annotation = get_args(annotation)[0]
        else:
            return annotation


_KINDS: dict[object, Kind] = {bool: "bool", int: "int", float: "float", str: "str", dict: "mapping"}


def _make_spec(name: str, info: FieldInfo, section: str) -> FlagSpec:
    annotation = _strip_optional(info.annotation)
    is_list = get_origin(annotation) is list
    element = _strip_optional(get_args(annotation)[0]) if is_list else annotation
    literal = get_origin(element) is Literal
    return FlagSpec(
        name=name,
        section=section,
        help=" ".join((info.description or "").split()),
        kind="str" if literal else _KINDS[get_origin(element) or element],
        is_list=is_list,
        choices=tuple(str(a) for a in get_args(element)) if literal else (),
        spelling=next((m for m in info.metadata if isinstance(m, Flag)), Flag()),
        default=info.get_default(call_default_factory=True, validated_data={}),
    )


@cache
def flag_specs() -> dict[str, FlagSpec]:
    """Return attribute name -> spec, in the order of the help text."""
    specs = {}
    for section in SECTIONS:
        title = (section.__doc__ or "").strip().rstrip(".")
        for name in section.__annotations__:
            specs[name] = _make_spec(name, Args.model_fields[name], title)
    return specs


@cache
def switched_off() -> dict[str, str]:
    """Return `disable_...` key -> the setting that it turns off."""
    specs = flag_specs().values()
    return {f"{s.spelling.off}_{s.name}": s.name for s in specs if s.spelling.off}


@cache
def respelled() -> dict[str, str]:
    """Return key or variable -> attribute, for settings with a spelling that differs from their attribute."""
    specs = flag_specs().values()
    others = [(name, s.name) for s in specs for name in (s.spelling.name, *s.spelling.also) if name]
    return {name.replace("-", "_"): attribute for name, attribute in others}
