"""Which distributions are slime's own: the core, the bundle of first-party plugins, and what the bundle requires."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

CORE = "slime-rl-core"
"""slime_core alone."""

BUNDLE = "slime-rl"
"""Every first-party plugin in one wheel; of the core's version."""


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


def allowed_words(argv: Sequence[str], env: Mapping[str, str]) -> set[str] | None:
    """What `--no-plugins` and SLIME_PLUGINS leave besides slime's own, before settings are read; None is everything."""
    if "--no-plugins" in argv or env.get("SLIME_NO_PLUGINS", "").strip().lower() in ("1", "true", "yes", "on"):
        return set()
    text = env.get("SLIME_PLUGINS")
    return None if text is None else {word.strip() for word in text.split(",") if word.strip()}


def is_allowed(words: set[str] | None, name: str, distribution: str) -> bool:
    """Whether an entry point may be used."""
    named = words is None or not words.isdisjoint((name, distribution, f"{distribution}:{name}"))
    return named or is_own(distribution)


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
    """Distributions of `plugins/*/*` beside a source checkout's slime_core; none for an installed wheel."""
    files = root.glob("plugins/*/*/pyproject.toml") if (root / "pyproject.toml").is_file() else ()
    found = (re.search(r'^name\s*=\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE) for file in files)
    return [normalized(match[1]) for match in found if match]
