"""The kinds of component: what each is called, which setting selects it and how slime calls it.

The table is data: discovery, the resolver, the signature check and `slime plugins` all read it, and none of them
branches on a kind. Adding a kind is adding a row (`kinds_table.py`). The plural is the key
and the entry-point group is `slime.<plural>`; the singular is what messages and distribution names
(`slime-<singular>-<name>`) use.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from slime_core.errors import PluginNotFoundError, did_you_mean
from slime_core.plugins.hooks import hook_flags, spec_modules
from slime_core.plugins.kind import FUNCTIONS, Call, FunctionFlag, Kind
from slime_core.plugins.kinds_table import COMPONENTS, FUNCTION_FLAGS
from slime_core.protocols import LauncherTraits

HOOKSPECS_GROUP = "slime.hookspecs"
"""Entry-point group of modules that declare further hooks: read by `plugins/hooks.py`; no component."""
HOOK_GROUP = "slime.plugins"
"""Entry-point group of hook modules: told to all, never selected by name."""

_KINDS = (
    *COMPONENTS,
    Kind(
        name="launchers",
        flags=("--launcher",),
        canonical=("launcher", "Launcher"),
        methods={
            "train": Call("(self, settings) -> dict"),
            "missing": Call("(self, args) -> str"),
        },
        construct=Call("()"),
        traits=LauncherTraits,
    ),
    Kind(
        name="commands",
        flags=("the first word after `slime`",),
        canonical=("command",),
        instance="Command",
    ),
    Kind(name=FUNCTIONS, flags=("a --*-path flag of a function",), canonical=()),
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}
"""Plural -> row."""


@functools.cache
def function_flags() -> Mapping[str, FunctionFlag]:
    """Name -> flag whose function takes the place of a step: the core's, and those that a distribution declares."""
    declared = [row for module in spec_modules() for row in module.FLAGS if isinstance(row, FunctionFlag)]
    return {row.name: row for row in (*FUNCTION_FLAGS, *declared)}


def flag_rows() -> tuple[Kind, ...]:
    """What flags select: a component of each kind, and functions that take the place of a step or implement hooks."""
    return (*_KINDS, *function_flags().values(), *hook_flags().values())


def kind_of(name: str) -> Kind:
    """The row of a plural or singular name, of a function's flag or a hook's. Raises PluginNotFoundError for others."""
    for kind in flag_rows():
        if name in (kind.name, kind.singular):
            return kind
    hint = did_you_mean(name, [*(k.name for k in _KINDS), "hooks"], form="{!r}")
    raise PluginNotFoundError(f"no plugin kind {name!r}.{hint} Kinds: {', '.join(sorted(KINDS))}")
