"""Flags that belong to somebody else: Megatron's, an engine's server's (`--sglang-*`), its router's (`--router-*`).

They are collected as attributes of `args` under their own names and change nothing in the core. A `ForeignFlags`
object is one owner's list; an engine or trainer brings its own by an entry point of the group `slime.foreign_flags`
(see `foreign`), with its name in `used_by`. Flags given although nobody in `used_by` is selected end in one warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from slime_core.config.origins import Entry

if TYPE_CHECKING:
    from slime_core.protocols import Args

ForeignKind = Literal["switch", "toggle", "int", "float", "size", "str", "json", "any"]
"""switch: `--x`, true when given; toggle: `--x` and `--no-x`; size: a whole number that may end in k, M, Ki, ...;
any: what the text reads as."""


@dataclass(frozen=True)
class ForeignFlag:
    """One flag of another program."""

    name: str
    """Without the leading dashes."""
    kind: ForeignKind = "any"
    is_list: bool = False
    aliases: tuple[str, ...] = ()
    """Its other names; all set the same attribute."""
    stored_as: str = ""
    """Name on `args` when it is not the flag's name with underscores."""
    choices: tuple[Any, ...] = ()
    """Allowed values, of a list's elements; empty when any is allowed."""
    count: int | None = None
    """How many values a list has; None is any number."""
    may_be_empty: bool = False
    """A list of no values is allowed, and for another kind the flag without a value, which stores `const`."""
    const: Any = None
    default: Any = None
    """The other program's own, for the help text; nothing is stored when the flag is not given."""
    help: str = ""
    off: tuple[str, ...] = ()
    """Names that store false, of a toggle; for those of the form `--no-x` it needs none."""

    @property
    def attribute(self) -> str:
        """Name on `args`."""
        return self.stored_as or self.name.replace("-", "_")

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling that stores the value, without dashes."""
        return (self.name, *self.aliases)

    def show(self, value: Any) -> str:
        """The command line's spelling of a value, for messages."""
        if isinstance(value, bool):
            return f"--{self.name}" if value or not self.off else f"--{self.off[0]}"
        return f"--{self.name} {' '.join(map(str, value)) if isinstance(value, list) else value}"


@dataclass(frozen=True)
class FlagList:
    """Every flag of an owner whose flags are looked up only when given, as one version of the program has them."""

    flags: tuple[ForeignFlag, ...]
    version: str
    """For messages, such as "SGLang 0.5.20"."""

    @cached_property
    def by_name(self) -> dict[str, ForeignFlag]:
        """Every name, with underscores, and every attribute -> flag."""
        names = {name.replace("-", "_"): flag for flag in self.flags for name in flag.names}
        return {flag.attribute: flag for flag in self.flags} | names

    @cached_property
    def by_off_name(self) -> dict[str, ForeignFlag]:
        """Every name that stores false, with underscores -> flag."""
        return {name.replace("-", "_"): flag for flag in self.flags for name in flag.off}


@dataclass(frozen=True)
class ForeignFlags:
    """One owner's flags."""

    owner: str
    flags: tuple[ForeignFlag, ...] = ()
    prefixes: tuple[str, ...] = ()
    """Any flag beginning so is the owner's, e.g. "sglang-"."""
    used_by: tuple[str, ...] = ()
    """Names of the trainers and engines that take these flags."""
    chooses: str = ""
    """The setting, "train_backend" or "rollout_engine", that a given flag makes the first of `used_by` where it is
    left at "auto"."""
    chosen_by: tuple[tuple[str, ...], ...] = ()
    """Settings of slime's own that choose as well: all of one entry given."""
    sizes: tuple[str, ...] = ()
    """Attributes that say over how many processes something is split; above 1 they are refused where none of `used_by`
    is selected, as a run that is not split is another run."""
    default_of: Callable[[Any, str], Any] | None = None
    """(args, attribute) -> the value that the program has where the flag is not given; asked when somebody's code reads
    that attribute, whatever backend is selected. LookupError when it has none. A function of a module, since `args` is
    sent to other processes."""
    listing: Callable[[Mapping[str, Any]], FlagList] | None = None
    """All flags behind the prefixes, asked for only when one is given; the argument is what was given of slime's own
    settings, as it was spelled. Without it such a flag may have any name and value. With it and without prefixes, the
    owner's flags have names of any form: a name that is nobody else's is looked up in the list, which is then asked
    for with nothing given. May raise ConfigError."""
    abbreviates: bool = False
    """Whether the beginning of a listed name stands for it where no other begins so, as in the program's own parser."""
    help_flag: str = ""
    """Prints that list, such as "help-sglang"."""
    examples: Sequence[str] = ()
    """Names out of that list for `--help`, which does not open it."""
    derives: Callable[[Mapping[str, Entry]], Mapping[str, tuple[Any, str]]] | None = None
    """The owner's entries -> settings of slime's that follow from them, with what each follows from; for those that
    nobody gave, where a chosen backend takes the flags."""
    check: Callable[[Any, Mapping[str, Entry]], Sequence[str]] | None = None
    """Called with the finished `args` and the owner's entries (by attribute) when there are any; returns warnings and
    may raise ConfigError."""

    @cached_property
    def by_attribute(self) -> dict[str, ForeignFlag]:
        """Attribute on `args`, or another name with underscores -> flag, of those that need no listing."""
        return FlagList(self.flags, self.owner).by_name

    @property
    def has_open_names(self) -> bool:
        """Whether its flags are known only by looking into the list."""
        return self.listing is not None and not self.prefixes

    @cached_property
    def listed(self) -> FlagList:
        """The list of an owner with open names. May raise ConfigError."""
        assert self.listing is not None
        return self.listing({})

    def find(self, attribute: str) -> ForeignFlag | None:
        """The flag behind an attribute name, if it is this owner's; of any kind when only its prefix is known."""
        if attribute in self.by_attribute:
            return self.by_attribute[attribute]
        if self.has_open_names:
            listed = self.listed
            return listed.by_name.get(attribute) or listed.by_off_name.get(attribute)
        dashed = attribute.replace("_", "-")
        return ForeignFlag(dashed) if any(dashed.startswith(p) for p in self.prefixes) else None


def find_foreign(foreign: Sequence[ForeignFlags], attribute: str) -> tuple[ForeignFlags, ForeignFlag] | None:
    """Owner and flag of an attribute name; lists of open names are looked into last, as that takes milliseconds."""
    for owner in sorted(foreign, key=lambda o: o.has_open_names):
        flag = owner.find(attribute)
        if flag is not None:
            return owner, flag
    return None


@dataclass(frozen=True)
class Defaults:
    """What owners say of attributes that nobody gave; goes along with `args` into other processes."""

    owners: tuple[Callable[[Any, str], Any], ...] = ()
    """Their `default_of`."""

    def __call__(self, args: Args, name: str) -> Any:
        """The first answer. Raises LookupError when nobody has one."""
        for default_of in self.owners:
            try:
                return default_of(args, name)
            except LookupError:
                continue
        raise LookupError(name)
