"""Which distributions are slime's own (core, bundle, what the bundle requires), and which others may be used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

CORE = "slime-rl-core"
"""slime_core alone."""

BUNDLE = "slime-rl"
"""Every first-party plugin in one wheel; of the core's version."""

ALLOW_VARIABLE = "SLIME_PLUGINS"
"""Comma-separated names, distributions or `dist:name` of the plugins that may be used besides slime's own."""

SAFE_VARIABLE = "SLIME_NO_PLUGINS"
"""Set to 1, or `--no-plugins`: slime's own plugins only, and no plugin directory is searched."""


def normalized(distribution: str) -> str:
    """A distribution name in the form the packaging standard compares."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def installed(distribution: str) -> metadata.Distribution | None:
    """Its metadata; None where it is not installed."""
    try:
        return metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def own_distributions() -> frozenset[str]:
    """slime's own, by normalized name: core, bundle, the slime-* the bundle requires, and the checkout's folders."""
    own = {CORE, BUNDLE}
    bundle = installed(BUNDLE)
    for text in (bundle and bundle.requires) or ():
        if "extra" not in text.partition(";")[2] and (match := re.match(r"slime[-_.][A-Za-z0-9._-]+", text, re.I)):
            own.add(normalized(match[0]))
    own.update(_checkout_names(Path(__file__).resolve().parents[1]))
    return frozenset(own)


def is_own(distribution: str) -> bool:
    """Whether a distribution is slime's own."""
    return normalized(distribution) in own_distributions()


@dataclass(frozen=True)
class AllowList:
    """Which plugins a process may use: all, those that SLIME_PLUGINS names, or none but slime's own.

    Read from the environment, so that processes started by a run agree with it. slime's own are always allowed, since
    no run can do without an estimator or a generate function. A component chosen by file or import path is never left
    out, as the user typed it.
    """

    words: frozenset[str] | None
    """What may be used besides slime's own; None is everything."""
    set_by: str = ""
    """For messages: what the user typed."""

    @classmethod
    def of(cls, argv: Sequence[str] = (), env: Mapping[str, str] | None = None) -> AllowList:
        """What SLIME_NO_PLUGINS and SLIME_PLUGINS say, and `--no-plugins` on a line that has not been read yet."""
        env = os.environ if env is None else env
        if "--no-plugins" in argv or safe_mode(env):
            return cls(frozenset(), f"--no-plugins / {SAFE_VARIABLE}")
        text = env.get(ALLOW_VARIABLE)
        if text is None:
            return cls(None)
        return cls(frozenset(word.strip() for word in text.split(",") if word.strip()), f"{ALLOW_VARIABLE}={text!r}")

    def allows(self, name: str, distribution: str) -> bool:
        """Whether a distribution's component, hook module or other entry point may be used."""
        if self.words is None or not distribution or is_own(distribution):
            return True
        return not self.words.isdisjoint(_ways_to_name(name, distribution))

    def unknown(self, offered: Iterable[tuple[str, str]]) -> list[str]:
        """The words that mean none of these names and distributions, sorted."""
        return sorted((self.words or frozenset()) - {word for each in offered for word in _ways_to_name(*each)})

    def way_in(self, name: str) -> str:
        """What to type to have a component that is left out."""
        if safe_mode():
            return f"leave out --no-plugins and unset {SAFE_VARIABLE}"
        return f"{ALLOW_VARIABLE}={','.join([*sorted(self.words or ()), name])}"


def _ways_to_name(name: str, distribution: str) -> tuple[str, ...]:
    return name, distribution, normalized(distribution), f"{distribution}:{name}"


def safe_mode(env: Mapping[str, str] | None = None) -> bool:
    """Whether SLIME_NO_PLUGINS is in force, which `--no-plugins` sets."""
    env = os.environ if env is None else env
    return env.get(SAFE_VARIABLE, "").strip().lower() not in ("", "0", "false", "f", "no", "n", "off")


def enter_safe_mode() -> None:
    """`--no-plugins`: for this process and those it starts."""
    os.environ[SAFE_VARIABLE] = "1"


def entry_points(group: str) -> list[tuple[str, metadata.EntryPoint, str]]:
    """(name, entry point, distribution) of a group, slime's own first, then by distribution and name.

    A distribution whose metadata cannot be read has none here; discovery reports it.
    """
    found: dict[tuple[str, str], metadata.EntryPoint] = {}
    for dist in metadata.distributions():
        try:
            if group not in (dist.read_text("entry_points.txt") or ""):
                continue  # most: parsing them all would take longer than everything else at start-up
            for entry in dist.entry_points:
                if entry.group == group:
                    found.setdefault((str(dist.name), entry.name), entry)
        except Exception:
            continue
    order = sorted(found, key=lambda key: (normalized(key[0]) not in (CORE, BUNDLE), key))
    return [(name, found[dist, name], dist) for dist, name in order]


def _checkout_names(root: Path) -> list[str]:
    """Return the distributions below `plugins/` of a source checkout; none for an installed wheel."""
    patterns = ("*/pyproject.toml", "*/*/pyproject.toml") if (root / "pyproject.toml").is_file() else ()
    files = [file for pattern in patterns for file in (root / "plugins").glob(pattern)]
    found = (re.search(r'^name\s*=\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE) for file in files)
    return [normalized(match[1]) for match in found if match]
