"""Build the plugin manager of a process: discover components, load hook modules, and report their errors.

Each command calls `build_manager` once per process. The resolver looks names up in `current_registry`. Pluggy silently
skips the second of two plugins with the same name, so duplicates are found here, in metadata, before registration.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pluggy

from slime_core.distributions import ALLOW_VARIABLE, SAFE_VARIABLE
from slime_core.errors import PluginConflictError, PluginError, PluginLoadError, did_you_mean
from slime_core.plugins.discovery import (
    PLUGIN_DIR_VARIABLE,
    check_plugin_directories,
    discovered,
    search_as,
)
from slime_core.plugins.hooks import bare_manager, guard, hook_specs
from slime_core.plugins.kinds import HOOK_GROUP
from slime_core.plugins.loading import load_ref
from slime_core.plugins.registry import ComponentRef, Registry, Resolved
from slime_core.protocols import Args

logger = logging.getLogger(__name__)


_TRACE_VARIABLE = "SLIME_TRACE_PLUGINS"
"""Environment variable: set to 1 to print every hook call as it begins."""


class Observer(Protocol):
    """Observer of the plugins in this process."""

    def resolved(self, found: Resolved) -> None:
        """Called when a component that a setting or a data row names is resolved."""

    def built(self, manager: pluggy.PluginManager) -> None:
        """Called when all hook plugins are registered."""


OBSERVERS: list[Observer] = []


class _Current:
    """The current registry for resolving specs, with the environment for which it was made."""

    registry: Registry | None = None
    surroundings: tuple[str | None, ...] = ()


def _surroundings() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in (PLUGIN_DIR_VARIABLE, ALLOW_VARIABLE, SAFE_VARIABLE))


def current_registry() -> Registry:
    """Return the process's registry: from the last `build_manager`, else from discovery alone."""
    if _Current.registry is None or _Current.surroundings != _surroundings():
        _Current.registry, _Current.surroundings = discovered(), _surroundings()
    return _Current.registry


def forget_registry() -> None:
    """Make the next use discover plugins again, e.g. after installing a plugin into the running process."""
    _Current.registry = None


def build_manager(args: Args | None = None, *, extra: Iterable[object] = ()) -> pluggy.PluginManager:
    """Return a manager with every allowed hook module loaded and every component registered.

    Args:
        args: The run's settings; `args.plugin_dir` directories are added to the search, unless `args.no_plugins`.
        extra: Further hook implementations of the caller (trackers, tests), registered first.

    Raises:
        ConfigError: A plugin directory does not exist or has no usable plugin.
        PluginConflictError: Two distributions use the same name for a hook module.
        PluginLoadError: A hook module cannot be imported or has a hook that slime does not know.
    """
    search_as(args)
    for warning in check_plugin_directories():
        logger.warning("%s", warning)
    manager, registry = bare_manager(), discovered()
    if os.environ.get(_TRACE_VARIABLE, "0") not in ("", "0"):
        manager.add_hookcall_monitoring(_print_call, lambda *_: None)
    for plugin in extra:
        manager.register(plugin)
    # Historic: pluggy also calls hook modules that are registered later, with the same registry.
    manager.hook.slime_register_components.call_historic(kwargs={"registry": registry})
    _check_allow_list(registry)
    for ref in _hook_modules(registry):
        _register_hook_module(manager, ref)
    for observer in OBSERVERS:
        observer.built(manager)
    _Current.registry, _Current.surroundings = registry, _surroundings()
    return manager


def _print_call(name: str, implementations: Sequence[Any], arguments: Mapping[str, object]) -> None:
    plugins = ", ".join(implementation.plugin_name for implementation in implementations) or "nobody"
    given = ", ".join(f"{key}={value!r:.60}" for key, value in arguments.items())
    print(f"[plugins] {name}({given}) -> {plugins}", file=sys.stderr)


def _check_allow_list(registry: Registry) -> None:
    """Raise PluginError if SLIME_PLUGINS names no installed plugin."""
    if unknown := registry.not_found():
        known = ", ".join(sorted({ref.distribution for ref in [*registry, *registry.left_out] if ref.distribution}))
        raise PluginError(
            f"{ALLOW_VARIABLE}: no plugin {', '.join(unknown)}. Installed distributions: {known or 'none'}"
            f"; `slime plugins list` shows the names, `unset {ALLOW_VARIABLE}` allows all"
        )


def hook_plugins(manager: pluggy.PluginManager) -> list[Resolved]:
    """Return the hook modules that `build_manager` loaded, with their source files."""
    loaded = {name: plugin for name, plugin in manager.list_name_plugin() if plugin is not None}
    found = []
    for ref in current_registry():
        plugin = loaded.get(f"{ref.distribution}:{ref.name}") if ref.kind == HOOK_GROUP else None
        if plugin is not None:
            found.append(Resolved(plugin, replace(ref, source_file=_source_of(plugin))))
    return found


def _source_of(plugin: object) -> Path | None:
    try:
        file = inspect.getsourcefile(plugin if inspect.ismodule(plugin) else type(plugin))
    except OSError:  # a class of a prompt or a notebook
        return None
    return Path(file) if file else None


def _hook_modules(registry: Registry) -> list[ComponentRef]:
    """Return every allowed hook module. Raises PluginConflictError if two have the same name."""
    offers = [ref for ref in registry if ref.kind == HOOK_GROUP]
    seen: dict[str, ComponentRef] = {}
    for ref in offers:
        if ref.name in seen:
            first = seen[ref.name]
            raise PluginConflictError(
                f"hook plugin {ref.name!r} is offered by {first.origin} and {ref.origin}."
                f" Uninstall one, or allow one: {ALLOW_VARIABLE}={first.distribution}:{ref.name}"
            )
        seen[ref.name] = ref
    return offers


def load_hook_module(ref: ComponentRef) -> Resolved:
    """Load a hook module into a manager of its own and return it with its source file.

    Raises what `build_manager` raises.
    """
    manager = bare_manager()
    manager.hook.slime_register_components.call_historic(kwargs={"registry": Registry()})
    plugin = _register_hook_module(manager, ref)
    return Resolved(plugin, replace(ref, source_file=_source_of(plugin)))


def _register_hook_module(manager: pluggy.PluginManager, ref: ComponentRef) -> object:
    subject = ref.label
    try:
        module, _ = load_ref(ref, None, subject)
        plugin = module() if isinstance(module, type) else module
        manager.register(plugin, name=f"{ref.distribution}:{ref.name}")
        manager.check_pending()
        guard(manager, plugin, lambda hook: f"{subject}: {hook}")
        return plugin
    except PluginLoadError as error:
        raise PluginLoadError(f"{error}. To run without it: --no-plugins") from error
    except Exception as error:
        reason = " ".join(str(error).split())  # pluggy's messages have several lines
        raise PluginLoadError(
            f"{subject}: {type(error).__name__}: {reason}.{_meant_hook(reason)} To run without it: --no-plugins"
        ) from error


def _meant_hook(reason: str) -> str:
    """Return the known hook whose name is closest to an unknown hook's name."""
    import re

    unknown = re.search(r"unknown hook '(\w+)'", reason)
    return did_you_mean(unknown[1], hook_specs()) if unknown else ""
