"""The kinds of component: the name of each kind, the setting that selects it and the calls that slime makes.

Discovery, the resolver, the signature check and `slime plugins` read this table and do not branch on a kind. A new row
in `kinds_table.py` adds a kind. The plural is the key, and `slime.<plural>` is the entry-point group. Messages and
distribution names (`slime-<singular>-<name>`) use the singular.
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
"""Entry-point group of modules that declare further hooks, read by `plugins/hooks.py`. They are not components."""
HOOK_GROUP = "slime.plugins"
"""Entry-point group of hook modules: all of them receive every call, and none is selected by name."""

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
    """Return name -> flag whose function replaces a step, for the flags of the core and of distributions."""
    declared = [row for module in spec_modules() for row in module.FLAGS if isinstance(row, FunctionFlag)]
    return {row.name: row for row in (*FUNCTION_FLAGS, *declared)}


def flag_rows() -> tuple[Kind, ...]:
    """Return a row per kind of component, and per flag whose function replaces a step or implements a hook."""
    return (*_KINDS, *function_flags().values(), *hook_flags().values())


def kind_of(name: str) -> Kind:
    """Return the row of a kind (plural or singular), a function's flag or a hook. Raises PluginNotFoundError."""
    for kind in flag_rows():
        if name in (kind.name, kind.singular):
            return kind
    hint = did_you_mean(name, [*(k.name for k in _KINDS), "hooks"], form="{!r}")
    raise PluginNotFoundError(f"no plugin kind {name!r}.{hint} Kinds: {', '.join(sorted(KINDS))}")
