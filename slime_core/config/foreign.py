"""Flags of other programs: Megatron, an engine's server (`--sglang-*`), its router (`--router-*`).

The flags become attributes of `args` under their own names and change nothing in the core. A `ForeignFlags` object
holds the flags of one owner, as an argparse parser. An engine or trainer registers its flags by an entry point of the
group `slime.foreign_flags`: name -> callable without arguments that returns a `ForeignFlags`, in a module with only
light imports. Only installed distributions are searched, since no setting is known yet. An entry point that cannot be
used logs a warning, and its flags are unknown. Flags given while no component of `used_by` is selected log a warning,
too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from slime_core.config.flag_parser import FlagParser
from slime_core.config.schema import Args
from slime_core.config.settings import Entry
from slime_core.config.spec import flag_specs
from slime_core.distributions import AllowList, entry_points
from slime_core.errors import ConfigError

logger = logging.getLogger(__name__)

GROUP = "slime.foreign_flags"
_RENAMED = "slime.renamed"


@dataclass(frozen=True)
class ForeignFlags:
    """The flags of one owner, another program."""

    owner: str
    parser: Callable[[Mapping[str, object]], FlagParser]
    """Builds the parser of all the flags, called when the first flag is given. Its argument maps slime's own settings
    to their given values, as spelled. May raise ConfigError."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of the owner's flags, e.g. "sglang-". If empty, the flags have any name: a name without another owner is
    looked up in the parser, which is then built with an empty mapping."""
    used_by: tuple[str, ...] = ()
    """Names of the trainers and engines that take these flags."""
    chooses: str = ""
    """Setting ("train_backend" or "rollout_engine") that a given flag changes from "auto" to the first of
    `used_by`."""
    chosen_by: tuple[tuple[str, ...], ...] = ()
    """Groups of slime's own settings that make the same choice when all settings of a group are given."""
    sizes: tuple[str, ...] = ()
    """Attributes that give a number of processes to split over. A value above 1 is refused if no component of `used_by`
    is selected, because a run without the split is a different run."""
    default_of: Callable[[Args, str], object] | None = None
    """(args, attribute) -> the program's default for a flag that is not given. Called when user code reads the
    attribute, with any backend. Raises LookupError if there is no default. Must be a module-level function, since
    `args` is sent to other processes."""
    help_flag: str = ""
    """Flag that prints the list, such as "help-sglang"."""
    examples: Sequence[str] = ()
    """Some names for `--help-all`, which does not build the parser."""
    derives: Callable[[Mapping[str, Entry]], Mapping[str, tuple[object, str]]] | None = None
    """The owner's entries -> slime settings derived from them, each with its value and its origin in words. Applied to
    settings that are not given, if a chosen backend takes the flags."""
    check: Callable[[Args, Mapping[str, Entry]], Sequence[str]] | None = None
    """Check of the finished `args` and the owner's entries (by attribute), called if there are entries. Returns
    warnings; may raise ConfigError."""

    @cached_property
    def listed(self) -> FlagParser:
        """The parser of an owner without prefixes. May raise ConfigError."""
        return self.parser({})

    @property
    def users(self) -> str:
        """Names in `used_by`, for help texts."""
        return f"taken by: {', '.join(self.used_by) or 'none in this version'}"

    def help(self, settings: Mapping[str, object]) -> str:
        """Return the help of every flag; `settings` as for `parser`. Raises ConfigError."""
        parser = self.parser(settings)
        flags = [flag for flag in parser.flags if flag.dest not in flag_specs()]
        return parser.page({f"{self.owner} ({parser.prog}; {self.users})": flags})

    def owns(self, name: str) -> bool:
        """Return whether a name with underscores belongs to this owner."""
        if self.prefixes:
            return name.replace("_", "-").startswith(self.prefixes)
        return name in self.listed.by_name


def find_foreign(foreign: Sequence[ForeignFlags], name: str) -> ForeignFlags | None:
    """Return the owner of a name with underscores; parsers are searched last, since that takes milliseconds."""
    return next((owner for owner in sorted(foreign, key=lambda o: not o.prefixes) if owner.owns(name)), None)


def find_owners(argv: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[ForeignFlags, ...], list[str]]:
    """Return the owners installed for this process, and warnings about entry points that cannot be used.

    `--no-plugins` and SLIME_PLUGINS leave out owners of other distributions, as they do for other plugins.
    """
    owners, warnings = list[ForeignFlags](), list[str]()
    for name, entry, distribution in entry_points(GROUP, AllowList.of(argv, env)):
        try:
            owner = entry.load()()
            if not isinstance(owner, ForeignFlags):
                raise TypeError(f"returned {type(owner).__name__}, not ForeignFlags")
            _refuse_overlap(owner, owners)
        except Exception as error:  # third-party code that runs before --help: any error becomes a warning
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.append(f"the flags of {name!r} ({distribution}, {GROUP}) are not known: {text}")
            continue
        owners.append(owner)
    return tuple(owners), warnings


def renamed(word: str) -> str:
    """Return slime's spelling of another program's setting, from the entry points of `slime.renamed`; "" if unknown.

    Args:
        word: A flag, a key, or text like `data.train_batch_size=8`, which is no setting.
    """
    for name, entry, distribution in entry_points(_RENAMED):
        try:
            if told := str(entry.load()(word)):
                return told
        except Exception as error:  # third-party code, called while slime words an error that must reach the user
            logger.warning("%r (%s, %s) raised %s: %s", name, distribution, _RENAMED, type(error).__name__, error)
    return ""


def _refuse_overlap(owner: ForeignFlags, others: Sequence[ForeignFlags]) -> None:
    for other in others:
        shared = {p for p in owner.prefixes for q in other.prefixes if p.startswith(q) or q.startswith(p)}
        if shared:
            raise ValueError(f"{sorted(shared)[0]!r} already belongs to {other.owner}")


ByOwner: TypeAlias = list[tuple[ForeignFlags, dict[str, Entry]]]


def by_owner(owners: Sequence[ForeignFlags], entries: Mapping[str, Entry]) -> ByOwner:
    """Group entries by owner; attributes without an owner are left out."""
    whose = {name: find_foreign(owners, name) for name in entries if name not in flag_specs()}
    found = [(owner, {n: entries[n] for n, other in whose.items() if other is owner}) for owner in owners]
    return [(owner, own) for owner, own in found if own]


class Lists:
    """The owners' parsers, each built when the first of its flags is looked up."""

    def __init__(self, owners: Sequence[ForeignFlags], settings: Mapping[str, object]) -> None:
        """Store the arguments; no parser is built yet.

        Args:
            owners: Owners of the flags.
            settings: Given values of slime's own settings, for `ForeignFlags.parser`.
        """
        self.owners = owners
        self._settings = settings
        self._made: dict[str, FlagParser] = {}

    def of(self, name: str) -> FlagParser | None:
        """Return the parser that owns a name with underscores, or None. May raise ConfigError."""
        owner = find_foreign(self.owners, name)
        if owner is None:
            return None
        if not owner.prefixes:
            return owner.listed
        if owner.owner not in self._made:
            self._made[owner.owner] = owner.parser(self._settings)
        return self._made[owner.owner]

    def read(self, given: Sequence[tuple[str, Entry]]) -> dict[str, Entry]:
        """Convert the values from files and variables to their types; later entries replace earlier ones.

        Args:
            given: Names with underscores and their entries, lowest layer first.

        Raises:
            ConfigError: A flag is unknown, is set twice in one file, or has a value that does not fit.
        """
        entries: dict[str, Entry] = {}
        in_files: dict[tuple[str, str], tuple[str, str]] = {}
        for name, entry in given:
            parser, where = self.of(name), entry.origin.where
            assert parser is not None
            named = entry.origin.of(name)
            attribute, value = parser.read(name, entry.value, named, [*parser.by_name, *flag_specs()])
            if entry.origin.kind == "file":
                other, line = in_files.setdefault((where.rpartition(":")[0], attribute), (name, where))
                if (other, line) != (name, where):
                    raise ConfigError(f"{where}: {name!r} is already set as {other!r} in {line}; remove one.")
            entries[attribute] = Entry(value, entry.origin, named)
        return entries
