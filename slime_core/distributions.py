"""Tell slime's own distributions (core, bundle, the bundle's requirements) from others, and apply the allow list."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from slime_core.errors import PluginNotFoundError

CORE = "slime-rl-core"
"""Distribution that contains only slime_core."""

BUNDLE = "slime-rl"
"""Distribution with every first-party plugin in one wheel; it has the core's version."""

ALLOW_VARIABLE = "SLIME_PLUGINS"
"""Environment variable: comma-separated names, distributions or `dist:name` of the allowed third-party plugins."""

GROUP_PREFIX = "slime."
"""Begins the name of each group of entry points that slime reads."""

SAFE_VARIABLE = "SLIME_NO_PLUGINS"
"""Environment variable: 1 allows slime's own plugins only and searches no plugin directory, as `--no-plugins`."""

_Declared = tuple[metadata.Distribution, str, list[metadata.EntryPoint] | Exception]
"""A distribution, its name, and its entry points of slime or the error that reading them raised."""


def normalized(distribution: str) -> str:
    """Return a distribution name in the normalized form of the packaging standard."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def installed(distribution: str) -> metadata.Distribution | None:
    """Return a distribution's metadata, or None if it is not installed."""
    try:
        return metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def own_distributions() -> frozenset[str]:
    """Return the normalized names of slime's own: core, bundle, its slime-* requirements, the checkout's folders."""
    own = {CORE, BUNDLE}
    bundle = installed(BUNDLE)
    for text in (bundle and bundle.requires) or ():
        if "extra" not in text.partition(";")[2] and (match := re.match(r"slime[-_.][A-Za-z0-9._-]+", text, re.I)):
            own.add(normalized(match[0]))
    own.update(_checkout_names(Path(__file__).resolve().parents[1]))
    return frozenset(own)


def is_own(distribution: str) -> bool:
    """Return True if a distribution is slime's own."""
    return normalized(distribution) in own_distributions()


@dataclass(frozen=True)
class AllowList:
    """The plugins that a process may use: all, the ones named in SLIME_PLUGINS, or only slime's own.

    The list is read from the environment, so that processes started by a run use the same list. slime's own plugins are
    always allowed, since every run needs an estimator and a generate function. A component chosen by file or import
    path is always allowed, because the user named it.
    """

    words: frozenset[str] | None
    """Names allowed besides slime's own plugins; None allows everything."""
    set_by: str = ""
    """Setting that the user typed, for messages."""

    @classmethod
    def of(cls, argv: Sequence[str] = (), env: Mapping[str, str] | None = None) -> AllowList:
        """Build the list from SLIME_NO_PLUGINS, SLIME_PLUGINS and `--no-plugins` in an unparsed command line."""
        env = os.environ if env is None else env
        if "--no-plugins" in argv or safe_mode(env):
            return cls(frozenset(), f"--no-plugins / {SAFE_VARIABLE}")
        text = env.get(ALLOW_VARIABLE)
        if text is None:
            return cls(None)
        return cls(frozenset(word.strip() for word in text.split(",") if word.strip()), f"{ALLOW_VARIABLE}={text!r}")

    def allows(self, name: str, distribution: str) -> bool:
        """Return True if a distribution's component, hook module or other entry point may be used."""
        if self.words is None or not distribution or is_own(distribution):
            return True
        return not self.words.isdisjoint(_ways_to_name(name, distribution))

    def unknown(self, offered: Iterable[tuple[str, str]]) -> list[str]:
        """Return the listed words that match no name or distribution in `offered`, sorted."""
        return sorted((self.words or frozenset()) - {word for each in offered for word in _ways_to_name(*each)})

    def way_in(self, name: str) -> str:
        """Return the setting that would allow an excluded component."""
        if safe_mode():
            return f"leave out --no-plugins and unset {SAFE_VARIABLE}"
        return f"{ALLOW_VARIABLE}={','.join([*sorted(self.words or ()), name])}"


def _ways_to_name(name: str, distribution: str) -> tuple[str, ...]:
    return name, distribution, normalized(distribution), f"{distribution}:{name}"


def safe_mode(env: Mapping[str, str] | None = None) -> bool:
    """Return True if SLIME_NO_PLUGINS is set; `--no-plugins` sets it."""
    env = os.environ if env is None else env
    return env.get(SAFE_VARIABLE, "").strip().lower() not in ("", "0", "false", "f", "no", "n", "off")


def enter_safe_mode() -> None:
    """Apply `--no-plugins` to this process and the processes that it starts."""
    os.environ[SAFE_VARIABLE] = "1"


def entry_points(group: str, allow: AllowList | None = None) -> list[tuple[str, metadata.EntryPoint, str]]:
    """Return (name, entry point, distribution) of the allowed entry points of a group.

    slime's own come first, then the others by distribution and name. `allow` is the environment's list by default.
    A distribution with unreadable metadata is skipped; discovery reports it.
    """
    found: dict[tuple[str, str], metadata.EntryPoint] = {}
    for _, name, entries in declared():
        for entry in entries if isinstance(entries, list) else ():
            if entry.group == group:
                found.setdefault((name, entry.name), entry)
    order = sorted(found, key=lambda key: (normalized(key[0]) not in (CORE, BUNDLE), key))
    allow = allow or AllowList.of()
    return [(name, found[dist, name], dist) for dist, name in order if allow.allows(name, dist)]


def offered(group: str, name: str) -> Any:
    """Return the object that an installed distribution offers under `name`; None without one."""
    return next((entry.load() for known, entry, _ in entry_points(group) if known == name), None)


def provided(group: str, name: str) -> Any:
    """Return the object that an installed distribution offers under `name`. Raises PluginNotFoundError."""
    found = offered(group, name)
    if found is None:
        raise PluginNotFoundError(f"slime_core has no {name} without its plugins; type: pip install {BUNDLE}")
    return found


def declared() -> Iterator[_Declared]:
    """Yield the distributions on `sys.path` that offer entry points to slime.

    A folder is read once, and again after it has changed: a run asks for entry points a dozen times.
    """
    for place in sys.path:
        try:
            stat = os.stat(place or ".")
        except OSError:
            continue
        yield from _declared_in(place, (stat.st_dev, stat.st_ino, stat.st_mtime_ns))


@cache
def _declared_in(place: str, state: tuple[int, int, int]) -> list[_Declared]:
    found: list[_Declared] = []
    for dist in metadata.distributions(path=[place]):
        try:
            if GROUP_PREFIX not in (dist.read_text("entry_points.txt") or ""):
                continue  # most; parsing them all takes longer than the rest
            if entries := [entry for entry in dist.entry_points if entry.group.startswith(GROUP_PREFIX)]:
                found.append((dist, str(dist.name), entries))
        except Exception as error:  # what a torn METADATA or entry_points.txt raises differs by Python version
            found.append((dist, str(getattr(dist, "_path", dist)), error))
    return found


def _checkout_names(root: Path) -> list[str]:
    """Return the distributions below `plugins/` of a source checkout, or an empty list for an installed wheel."""
    patterns = ("*/pyproject.toml", "*/*/pyproject.toml") if (root / "pyproject.toml").is_file() else ()
    files = [file for pattern in patterns for file in (root / "plugins").glob(pattern)]
    found = (re.search(r'^name\s*=\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE) for file in files)
    return [normalized(match[1]) for match in found if match]
