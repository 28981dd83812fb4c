"""Flags that belong to somebody else: Megatron's, an engine's server's (`--sglang-*`), its router's (`--router-*`).

They are collected as attributes of `args` under their own names and change nothing in the core. A `ForeignFlags`
object is one owner's, with the program's flags as an argparse parser; an engine or trainer brings its own by an entry
point of the group `slime.foreign_flags`: name -> callable without arguments that returns it, in a module that imports
nothing heavy. Only installed distributions are asked, as this happens before any setting is known; one that cannot be
used ends in a warning, and its flags are unknown. Flags given although nobody in `used_by` is selected end in a
warning, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from slime_core.config.flag_parser import FlagParser
from slime_core.config.origins import Entry
from slime_core.config.spec import flag_specs
from slime_core.distributions import AllowList, entry_points
from slime_core.errors import ConfigError

logger = logging.getLogger(__name__)

GROUP = "slime.foreign_flags"
_RENAMED = "slime.renamed"


@dataclass(frozen=True)
class ForeignFlags:
    """One owner's flags."""

    owner: str
    parser: Callable[[Mapping[str, Any]], FlagParser]
    """Makes the parser with all of them, when one is given; the argument is what was given of slime's own settings, as
    it was spelled. May raise ConfigError."""
    prefixes: tuple[str, ...] = ()
    """Any flag beginning so is the owner's, e.g. "sglang-". Without one the names have any form: a name that is nobody
    else's is looked up in the parser, which is then made with nothing given."""
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
    help_flag: str = ""
    """Prints the list, such as "help-sglang"."""
    examples: Sequence[str] = ()
    """Some names for `--help-all`, which does not make the parser."""
    derives: Callable[[Mapping[str, Entry]], Mapping[str, tuple[Any, str]]] | None = None
    """The owner's entries -> settings of slime's that follow from them, with what each follows from; for those that
    nobody gave, where a chosen backend takes the flags."""
    check: Callable[[Any, Mapping[str, Entry]], Sequence[str]] | None = None
    """Called with the finished `args` and the owner's entries (by attribute) when there are any; returns warnings and
    may raise ConfigError."""

    @cached_property
    def listed(self) -> FlagParser:
        """The parser of an owner without prefixes. May raise ConfigError."""
        return self.parser({})

    def owns(self, name: str) -> bool:
        """Whether a name with underscores is this owner's."""
        if self.prefixes:
            return name.replace("_", "-").startswith(self.prefixes)
        return name in self.listed.by_name


def find_foreign(foreign: Sequence[ForeignFlags], name: str) -> ForeignFlags | None:
    """Whose flag a name with underscores is; parsers are looked into last, as that takes milliseconds."""
    return next((owner for owner in sorted(foreign, key=lambda o: not o.prefixes) if owner.owns(name)), None)


def find_owners(argv: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[ForeignFlags, ...], list[str]]:
    """The owners of this process, and warnings about entry points that cannot be used.

    `--no-plugins` and SLIME_PLUGINS leave out those of other distributions, as they do other plugins.
    """
    owners, warnings = list[ForeignFlags](), list[str]()
    allow = AllowList.of(argv, env)
    for name, entry, distribution in entry_points(GROUP):
        if not allow.allows(name, distribution):
            continue
        try:
            owner = entry.load()()
            if not isinstance(owner, ForeignFlags):
                raise TypeError(f"returned {type(owner).__name__}, not ForeignFlags")
            _refuse_overlap(owner, owners)
        except Exception as error:  # somebody else's code, run before --help: whatever it raises, slime goes on
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.append(f"the flags of {name!r} ({distribution}, {GROUP}) are not known: {text}")
            continue
        owners.append(owner)
    return tuple(owners), warnings


def renamed(word: str) -> str:
    """What to type for a word of another program, as the entry points of `slime.renamed` tell; empty where none does.

    Args:
        word: A flag, a key, or one of the form `data.train_batch_size=8`, that is no setting.
    """
    allow = AllowList.of()
    for name, entry, distribution in entry_points(_RENAMED):
        if not allow.allows(name, distribution):
            continue
        try:
            if told := str(entry.load()(word)):
                return told
        except Exception as error:  # somebody else's code, in the middle of an error of ours, which is to be told
            logger.warning("%r (%s, %s) raised %s: %s", name, distribution, _RENAMED, type(error).__name__, error)
    return ""


def _refuse_overlap(owner: ForeignFlags, others: Sequence[ForeignFlags]) -> None:
    for other in others:
        shared = {p for p in owner.prefixes for q in other.prefixes if p.startswith(q) or q.startswith(p)}
        if shared:
            raise ValueError(f"{sorted(shared)[0]!r} already belongs to {other.owner}")


ByOwner: TypeAlias = list[tuple[ForeignFlags, dict[str, Entry]]]


def by_owner(owners: Sequence[ForeignFlags], entries: Mapping[str, Entry]) -> ByOwner:
    """The owners of these attributes, each with its own; what is nobody's is left out."""
    whose = {name: find_foreign(owners, name) for name in entries if name not in flag_specs()}
    found = [(owner, {n: entries[n] for n, other in whose.items() if other is owner}) for owner in owners]
    return [(owner, own) for owner, own in found if own]


class Lists:
    """The owners' parsers, each made when the first of its flags is looked up."""

    def __init__(self, owners: Sequence[ForeignFlags], settings: Mapping[str, Any]) -> None:
        """Ask nobody yet.

        Args:
            owners: Whose flags there are.
            settings: What was given of slime's own settings, for `ForeignFlags.parser`.
        """
        self.owners = owners
        self._settings = settings
        self._made: dict[str, FlagParser] = {}

    def of(self, name: str) -> FlagParser | None:
        """The parser of the owner of a name with underscores. May raise ConfigError."""
        owner = find_foreign(self.owners, name)
        if owner is None:
            return None
        if not owner.prefixes:
            return owner.listed
        if owner.owner not in self._made:
            self._made[owner.owner] = owner.parser(self._settings)
        return self._made[owner.owner]

    def read(self, given: Sequence[tuple[str, Entry]]) -> dict[str, Entry]:
        """Type what files and variables say, lowest layer first; later ones replace earlier ones.

        Args:
            given: Names with underscores, and what is said of them.

        Raises:
            ConfigError: A flag is unknown, is set twice in one file, or has a value that does not fit.
        """
        entries: dict[str, Entry] = {}
        in_files: dict[tuple[str, str], tuple[str, str]] = {}
        for name, entry in given:
            parser, where = self.of(name), entry.origin.where
            assert parser is not None
            named = where if entry.origin.kind == "env" else f"{where}: {name}"
            attribute, value = parser.read(name, entry.value, named, [*parser.by_name, *flag_specs()])
            if entry.origin.kind == "file":
                other, line = in_files.setdefault((where.rpartition(":")[0], attribute), (name, where))
                if (other, line) != (name, where):
                    raise ConfigError(f"{where}: {name!r} is already set as {other!r} in {line}; remove one.")
            entries[attribute] = Entry(value, entry.origin, named)
        return entries
