"""The kinds of component: what each is called, which setting selects it and how slime calls it.

The table is data: discovery, the resolver, the signature check and `slime plugins` all read it, and none of them
branches on a kind. Adding a kind is adding a row (`kinds_generation.py`, `kinds_training.py`). The plural is the key
and the entry-point group is `slime.<plural>`; the singular is what messages and distribution names
(`slime-<singular>-<name>`) use.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from slime_core.errors import PluginNotFoundError
from slime_core.plugins.kind import Call, Kind
from slime_core.plugins.kinds_generation import GENERATION
from slime_core.plugins.kinds_training import TRAINING

__all__ = ["HOOK_GROUP", "KINDS", "Call", "Kind", "kind_of"]

HOOK_GROUP = "slime.plugins"
"""Entry-point group of hook modules: told to all, never selected by name."""

_KINDS = (
    *GENERATION,
    *TRAINING,
    Kind(
        name="launchers",
        singular="launcher",
        flags=("--launcher",),
        canonical=("launcher", "Launcher"),
        methods={
            "train": Call(("settings",), "(self, settings) -> dict"),
            "missing": Call(("args",), "(self, args) -> str"),
        },
        construct=Call((), "()"),
    ),
    Kind(
        name="commands",
        singular="command",
        flags=("the first word after `slime`",),
        canonical=("command",),
        instance="Command",
    ),
    Kind(name="functions", singular="function", flags=("every other --*-path flag",), canonical=()),
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}
"""Plural -> row."""


def kind_of(name: str) -> Kind:
    """The row of a plural or singular name. Raises PluginNotFoundError for another word."""
    for kind in _KINDS:
        if name in (kind.name, kind.singular):
            return kind
    close = difflib.get_close_matches(name, [k.name for k in _KINDS], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise PluginNotFoundError(f"no plugin kind {name!r}.{hint} Kinds: {', '.join(sorted(KINDS))}")
