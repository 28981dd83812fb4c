"""Which plugins a process may use: all, those that SLIME_PLUGINS names, or none but slime's own.

Read from the environment, so that processes started by a run agree with it. slime's own are always allowed
(`slime_core.distributions`), since no run can do without an estimator or a generate function. A component chosen by
file or import path is never left out, as the user typed it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from slime_core.distributions import is_own, normalized
from slime_core.plugins.registry import ComponentRef

ALLOW_VARIABLE = "SLIME_PLUGINS"
"""Comma-separated names, distributions or `dist:name` of the plugins that may be used besides slime's own."""

SAFE_VARIABLE = "SLIME_NO_PLUGINS"
"""Set to 1, or `--no-plugins`: slime's own plugins only, and no plugin directory is searched."""


@dataclass(frozen=True)
class AllowList:
    """The decision about every plugin that is found."""

    words: frozenset[str] | None
    """What may be used besides slime's own; None is everything."""
    set_by: str = ""
    """For messages: what the user typed."""

    @classmethod
    def from_environment(cls) -> AllowList:
        """What SLIME_NO_PLUGINS and SLIME_PLUGINS say."""
        if safe_mode():
            return cls(frozenset(), f"--no-plugins / {SAFE_VARIABLE}")
        text = os.environ.get(ALLOW_VARIABLE)
        if text is None:
            return cls(None)
        return cls(frozenset(word.strip() for word in text.split(",") if word.strip()), f"{ALLOW_VARIABLE}={text!r}")

    def allows(self, ref: ComponentRef) -> bool:
        """Whether the component or hook module may be used."""
        if self.words is None or not ref.distribution or is_own(ref.distribution):
            return True
        return bool(self.words & set(ways_to_name(ref)))

    def unknown(self, refs: Iterable[ComponentRef]) -> list[str]:
        """The words that name none of `refs`, sorted."""
        return sorted((self.words or frozenset()) - {word for ref in refs for word in ways_to_name(ref)})

    def way_in(self, ref: ComponentRef) -> str:
        """What to type to have a component that is left out."""
        if safe_mode():
            return f"leave out --no-plugins and unset {SAFE_VARIABLE}"
        return f"{ALLOW_VARIABLE}={','.join([*sorted(self.words or ()), ref.name])}"


def ways_to_name(ref: ComponentRef) -> tuple[str, ...]:
    """The words that mean a component in SLIME_PLUGINS."""
    return ref.name, ref.distribution, normalized(ref.distribution), f"{ref.distribution}:{ref.name}"


def safe_mode() -> bool:
    """Whether `--no-plugins` or SLIME_NO_PLUGINS is in force."""
    return os.environ.get(SAFE_VARIABLE, "").lower() not in ("", "0", "false", "f", "no", "n", "off")


def enter_safe_mode() -> None:
    """`--no-plugins`: for this process and those it starts."""
    os.environ[SAFE_VARIABLE] = "1"


def install_hint(ref: ComponentRef) -> str:
    """How to get a plugin's distribution again, with its requirements."""
    if ref.folder:
        return f"pip install -e {ref.folder}"
    if is_own(ref.distribution):
        return f"pip install --upgrade {ref.distribution}"
    # The name may be anybody's on the package index; whoever installed it knows where this one comes from.
    return f"install {ref.distribution} again, from where it came"
