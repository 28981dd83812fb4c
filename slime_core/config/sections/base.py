"""The parts of every section of settings: a pydantic base, the annotation that spells a flag, and forms of rules.

A section is a class with one attribute per flag; the string under the attribute is the flag's help. `schema.Args`
inherits all sections, so attributes are flat. A flag's spelling is derived from the attribute's name and type; `Flag`
is needed only if that is not enough. Below a section are its `RULES`: the values that are refused, and the values that
follow from others. `config/load.py` orders the rules of all sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.config.schema import Given
    from slime_core.config.settings import Settings


@dataclass(frozen=True)
class Flag:
    """Spelling of one flag where it differs from `--attribute-name`."""

    off: str | None = None
    """First word of the flag that stores False, which is also a key of files; otherwise the flag begins with `no`."""
    append: bool = False
    """A list that takes one value each time the flag is repeated."""
    paths: bool = False
    """A list of directories: split at the path separator when it comes from the environment."""
    metavar: str | None = None
    """Name of the value in the help text."""
    name: str | None = None
    """Flag, key and variable instead of the attribute's name, where that name is a word of Python."""
    also: tuple[str, ...] = ()
    """Other flags, without the dashes, for the same setting."""
    holds: Literal["", "path", "pairs", "spec", "marked"] = ""
    """The part of the value that is a path, which a run file gives relative to itself. path: the value, perhaps with a
    slice or a placeholder; pairs: each second text of a list; spec: a `.py` file in place of a component's name (the
    default of attributes that end in `_path`); marked: texts that begin with `./` or `../`."""


def _all_or_some(value: int) -> int:
    if value != -1 and value < 1:
        raise PydanticCustomError("top_k", "Input should be -1 (all tokens) or at least 1")
    return value


File = Annotated[str | None, Flag(holds="path")]
"""Path of a file or a directory."""
Spec = Annotated[str, Flag(holds="spec")]
"""Name of a component, for an attribute whose name does not end in `_path`."""
Components = Annotated[list[str], Flag(append=True)]
"""Names of components, one for each time that the flag is repeated."""
Switch = Annotated[bool, Flag(off="disable")]
"""Boolean that THUDM/slime's `--disable-...` turns off."""
TopK = Annotated[int, AfterValidator(_all_or_some)]
"""Number of the likeliest tokens to sample from."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Seed that every generator of random numbers takes."""
Share = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
ContextLength = Annotated[int, Field(gt=1)]


class Section(BaseModel):
    """One group of flags. Unknown keyword arguments become attributes."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, protected_namespaces=(), defer_build=True)


Rule: TypeAlias = "Callable[[Settings], None]"
"""Function that derives values with `s.derive`, warns, or raises ConfigError. Requirements of plugins, such as an
estimator that needs `--normalize-advantages`, are checked where the plugin is loaded."""


@dataclass(frozen=True)
class Refused:
    """A combination of settings that ends the command."""

    when: Callable[[Given], object]
    text: str
    """Message; `{lr}` becomes the setting as `Settings.cite` returns it, with value and origin."""

    def __call__(self, s: Settings) -> None:
        """Raise ConfigError if `when` holds."""
        if self.when(s.args):
            raise ConfigError(s.cited(self.text))


@dataclass(frozen=True)
class Exclusive:
    """A setting that excludes some others."""

    one: str
    others: str
    text: str = "are both set; use one"

    def __call__(self, s: Settings) -> None:
        """Raise ConfigError if the setting and one of the others are set."""
        for other in self.others.split():
            if getattr(s.args, self.one) and getattr(s.args, other):
                raise ConfigError(f"{s.cite(self.one)} and {s.cite(other)} {self.text}.")


@dataclass(frozen=True)
class NoEffect:
    """Settings that have no effect if `when` holds."""

    names: str
    when: Callable[[Given], object]
    why: str
    """As `Refused.text`."""

    def __call__(self, s: Settings) -> None:
        """Warn of each setting that was given."""
        for name in self.names.split() if self.when(s.args) else ():
            if s.is_given(name) and getattr(s.args, name) not in (None, False):
                s.warnings.append(f"{s.cite(name)} has no effect {s.cited(self.why)}.")


def run_rules(s: Settings, rules: Iterable[Rule]) -> None:
    """Run the rules in order: a later rule reads values that an earlier one derived. Raises ConfigError."""
    for rule in rules:
        rule(s)
