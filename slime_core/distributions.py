"""Which distributions are slime's own: the core, the bundle of first-party plugins, and what the bundle requires."""

from __future__ import annotations

import re
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


def has_bundle() -> bool:
    """Whether the first-party plugins are installed."""
    return next(iter(metadata.distributions(name=BUNDLE)), None) is not None


@cache
def own_distributions() -> frozenset[str]:
    """slime's own, by normalized name: core, bundle, what the bundle requires without an extra, and the checkout's."""
    own = {CORE, BUNDLE}
    try:
        requires = metadata.requires(BUNDLE) or ()
    except metadata.PackageNotFoundError:
        requires = ()
    for text in requires:
        if "extra" not in text.partition(";")[2] and (match := re.match(r"[A-Za-z0-9._-]+", text)):
            own.add(normalized(match[0]))
    own.update(_checkout_names(Path(__file__).resolve().parents[1]))
    return frozenset(own)


def _checkout_names(root: Path) -> list[str]:
    """Distributions of `plugins/*/*` beside a source checkout's slime_core; none for an installed wheel."""
    files = root.glob("plugins/*/*/pyproject.toml") if (root / "pyproject.toml").is_file() else ()
    found = (re.search(r'^name\s*=\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE) for file in files)
    return [normalized(match[1]) for match in found if match]
