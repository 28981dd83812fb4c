"""Which programs' flags are known, and what was given of them -> typed entries.

Owners come from the entry-point group `slime.foreign_flags`: name -> callable without arguments that returns a
`ForeignFlags`, in a module that imports nothing heavy. Only installed distributions are asked, as this happens before
any setting is known; one that cannot be used ends in a warning, and its flags are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.config.foreign_values import convert, convert_words
from slime_core.config.origins import Entry, Origin
from slime_core.config.passthrough import FlagList, ForeignFlag, ForeignFlags, find_foreign
from slime_core.config.spec import did_you_mean, flag_specs
from slime_core.distributions import allowed_words, entry_points, is_allowed
from slime_core.errors import ConfigError

GROUP = "slime.foreign_flags"


@dataclass(frozen=True)
class Given:
    """One flag of another program as its source spelled it."""

    attribute: str
    value: Any
    """The words after the flag when the origin is a flag, else one value."""
    origin: Origin

    @property
    def cited(self) -> str:
        """The setting as its source spells it, for messages: `--sglang-x 1 (flag)`, `run.yaml:3: sglang_x 1`."""
        flag = "--" + self.attribute.replace("_", "-")
        if self.origin.kind == "flag":
            words = self.value if isinstance(self.value, list) else [self.value]
            return " ".join([flag, *(repr(word) for word in words)]) + " (flag)"
        if self.origin.kind == "env":
            return f"{self.origin.where} {self.value!r}"
        return f"{self.origin.where}: {self.attribute} {self.value!r}"

    @property
    def named(self) -> str:
        """The same without the value."""
        if self.origin.kind == "flag":
            return "--" + self.attribute.replace("_", "-")
        return self.origin.where if self.origin.kind == "env" else f"{self.origin.where}: {self.attribute}"


def find_owners(argv: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[ForeignFlags, ...], list[str]]:
    """The owners of this process, and warnings about entry points that cannot be used.

    `--no-plugins` and SLIME_PLUGINS leave out those of other distributions, as they do other plugins.
    """
    owners, warnings = list[ForeignFlags](), list[str]()
    words = allowed_words(argv, env)
    for name, entry, distribution in entry_points(GROUP):
        if not is_allowed(words, name, distribution):
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


def _refuse_overlap(owner: ForeignFlags, others: Sequence[ForeignFlags]) -> None:
    for other in others:
        shared = {f.attribute for f in owner.flags} & set(other.by_attribute)
        shared |= {p for p in owner.prefixes for q in other.prefixes if p.startswith(q) or q.startswith(p)}
        if shared:
            raise ValueError(f"{sorted(shared)[0]!r} already belongs to {other.owner}")


def resolve(given: Sequence[Given], owners: Sequence[ForeignFlags], settings: Mapping[str, Any]) -> dict[str, Entry]:
    """Type what was given, lowest layer first; a later entry replaces an earlier one of the same attribute.

    Args:
        given: In the order of the layers.
        owners: Whose flags they may be; each is somebody's.
        settings: What was given of slime's own settings, for `ForeignFlags.listing`.

    Raises:
        ConfigError: A flag is unknown, is set twice in one file, or has a value that does not fit.
    """
    entries: dict[str, Entry] = {}
    listed: dict[str, FlagList] = {}
    in_files: dict[tuple[str, str], Given] = {}
    for item in given:
        found = find_foreign(owners, item.attribute)
        assert found is not None
        owner = found[0]
        flag, off = _flag(owner, item, listed, settings)
        try:
            words = item.origin.kind == "flag" and isinstance(item.value, list)
            value = convert_words(flag, item.value) if words else convert(flag, item.value)
        except ValueError as error:
            raise ConfigError(f"{item.cited}: {error}") from None
        if off:
            if not isinstance(value, bool):
                raise ConfigError(f"{item.cited}: expected true or false")
            value = not value
        if item.origin.kind == "file":
            key = (item.origin.where.rpartition(":")[0], flag.attribute)
            if key in in_files:
                other = in_files[key]
                raise ConfigError(
                    f"{item.origin.where}: {item.attribute!r} is already set as {other.attribute!r} in"
                    f" {other.origin.where}; remove one."
                )
            in_files[key] = item
        entries[flag.attribute] = Entry(value, item.origin)
    return entries


def _flag(
    owner: ForeignFlags, item: Given, listed: dict[str, FlagList], settings: Mapping[str, Any]
) -> tuple[ForeignFlag, bool]:
    """The flag behind a name, and whether the name turns it off. Raises ConfigError when the owner has none."""
    if item.attribute in owner.by_attribute or owner.listing is None:
        flag = owner.find(item.attribute)
        assert flag is not None
        return flag, False
    if owner.owner not in listed:
        listed[owner.owner] = owner.listing(settings)
    flags = listed[owner.owner]
    if item.attribute in flags.by_name:
        return flags.by_name[item.attribute], False
    if item.attribute in flags.by_off_name:
        return flags.by_off_name[item.attribute], True
    prefix = next(p for p in owner.prefixes if item.attribute.replace("_", "-").startswith(p))
    positive = item.attribute.removeprefix("no_")
    if positive == item.attribute:
        start = prefix.replace("-", "_")
        positive = start + item.attribute.removeprefix(start).removeprefix("no_")
    flag = flags.by_name.get(positive)
    if flag is not None and flag.kind == "toggle":
        return flag, True
    begun = {f.attribute: f for name, f in flags.by_name.items() if name.startswith(item.attribute)}
    if owner.abbreviates and item.origin.kind == "flag" and len(begun) == 1:
        return next(iter(begun.values())), False
    raise ConfigError(_unknown(item, flags))


def _unknown(item: Given, flags: FlagList) -> str:
    if item.origin.kind == "flag":
        known = [f"--{name}" for flag in flags.flags for name in flag.names]
        known += [spec.flag for spec in flag_specs().values()]
        hint = did_you_mean(item.named, known)
    else:
        hint = did_you_mean(item.attribute, [*flags.by_name, *flag_specs()])
    return f"{item.named}: {flags.version} has no such flag.{hint}"
