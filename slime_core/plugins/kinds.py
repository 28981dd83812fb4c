"""All rows of kinds: components, flags of functions, and the flags and hooks that other distributions declare.

The plural of a kind is its key, and `slime.<plural>` its entry-point group. Messages and distribution names
(`slime-<singular>-<name>`) use the singular.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType

from slime_core.distributions import entry_points
from slime_core.errors import PluginNotFoundError, did_you_mean
from slime_core.plugins import hookspecs
from slime_core.plugins.kind import COMPONENTS, FUNCTION_FLAGS, Kind
from slime_core.plugins.loading import import_module

HOOKSPECS_GROUP = "slime.hookspecs"
"""Entry-point group of modules that declare hooks and, in `FLAGS`, flags that take a function. No components."""
HOOK_GROUP = "slime.plugins"
"""Entry-point group of hook modules: all of them receive every call, and none is selected by name."""

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in COMPONENTS}
"""Plural -> row."""


@functools.cache
def spec_modules() -> tuple[ModuleType, ...]:
    """Return the modules that declare hooks and flags: of the core, and of distributions (a trainer's own hooks)."""
    declared = entry_points(HOOKSPECS_GROUP)
    return hookspecs, *(import_module(e.value, f"the hooks that {dist} declares") for _, e, dist in declared)


@functools.cache
def _flags() -> tuple[Kind, ...]:
    return *FUNCTION_FLAGS, *(row for module in spec_modules() for row in module.FLAGS)


def function_flags() -> Mapping[str, Kind]:
    """Return name -> flag whose function replaces a step, for the flags of the core and of distributions."""
    return {row.name: row for row in _flags() if row.replaces}


def hook_flags() -> Mapping[str, Kind]:
    """Return hook -> flag whose function implements it, for hooks that have a flag."""
    return {row.name: row for row in _flags() if row.is_hook}


def flag_rows() -> tuple[Kind, ...]:
    """Return a row per kind of component, and per flag whose function replaces a step or implements a hook."""
    return *COMPONENTS, *_flags()


def kind_of(name: str) -> Kind:
    """Return the row of a kind (plural or singular), a function's flag or a hook. Raises PluginNotFoundError."""
    for kind in flag_rows():
        if name in (kind.name, kind.singular):
            return kind
    hint = did_you_mean(name, [*KINDS, "hooks"], form="{!r}")
    raise PluginNotFoundError(f"no plugin kind {name!r}.{hint} Kinds: {', '.join(sorted(KINDS))}")
