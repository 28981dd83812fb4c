"""Builds the one plugin manager of a process: discovery, the hook modules, and what may go wrong with them.

`build_manager` is called once per process by whoever runs a command; `current_registry` is what the resolver looks
names up in. What a reader would get wrong: pluggy skips the second of two plugins with one name without a word, so
duplicates are found here, in metadata, before anything is registered.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

import pluggy

from slime_core.errors import PluginConflictError, PluginError, PluginLoadError
from slime_core.plugins import hookspecs
from slime_core.plugins.compat import check_compatible
from slime_core.plugins.discovery import (
    CORE_DISTRIBUTION,
    PLUGIN_DIR_VARIABLE,
    add_plugin_directories,
    check_plugin_directories,
    sources,
)
from slime_core.plugins.kinds import HOOK_GROUP
from slime_core.plugins.loading import load_ref
from slime_core.plugins.registry import ComponentRef, Registry, normalized

logger = logging.getLogger(__name__)

ALLOW_VARIABLE = "SLIME_PLUGINS"
"""Comma-separated names, distributions or `dist:name` of the hook modules to load; empty loads none.

slime's own trackers are always loaded: a run without its metrics would be no safer."""

TRACE_VARIABLE = "SLIME_TRACE_PLUGINS"
"""Set to 1 to print every hook call."""


class _Current:
    """The registry that specs are resolved in, remembered with the directories it was made for."""

    registry: Registry | None = None
    directories: str | None = None


def current_registry() -> Registry:
    """The process's registry: that of the last `build_manager`, else one made by discovery alone."""
    directories = os.environ.get(PLUGIN_DIR_VARIABLE, "")
    if _Current.registry is None or _Current.directories != directories:
        registry = Registry()
        manager = _bare_manager()
        _register_components(manager, registry)
        _Current.registry, _Current.directories = registry, directories
    return _Current.registry


def forget_registry() -> None:
    """Discover anew on next use, e.g. after installing a plugin into the running process."""
    _Current.registry = None


def build_manager(args: Any = None, *, extra: Iterable[object] = ()) -> pluggy.PluginManager:
    """A manager with every allowed hook module loaded and every component known.

    Args:
        args: The run's settings; `args.plugin_dir` directories are added to the search.
        extra: Further hook implementations of the caller (trackers, tests), registered first.

    Raises:
        ConfigError: A plugin directory does not exist or holds nothing that can be used.
        PluginConflictError: Two distributions name a hook module alike.
        PluginLoadError: A hook module cannot be imported or has a hook slime does not know.
        PluginIncompatibleError: A hook module's distribution requires another version of slime.
    """
    directories = getattr(args, "plugin_dir", None) or ()
    add_plugin_directories([directories] if isinstance(directories, str) else directories)
    for warning in check_plugin_directories():
        logger.warning("%s", warning)
    manager, registry = _bare_manager(), Registry()
    if os.environ.get(TRACE_VARIABLE, "0") not in ("", "0"):
        manager.add_hookcall_monitoring(_print_call, _print_nothing)
    for plugin in extra:
        manager.register(plugin)
    _register_components(manager, registry)
    for ref in _selected_hook_modules(registry):
        _register_hook_module(manager, ref)
    _Current.registry, _Current.directories = registry, os.environ.get(PLUGIN_DIR_VARIABLE, "")
    return manager


def hook_plugins(manager: pluggy.PluginManager) -> list[dict[str, Any]]:
    """Name, distribution and version of the hook modules that `build_manager` loaded."""
    loaded = {name for name, plugin in manager.list_name_plugin() if plugin is not None}
    found = [r for r in current_registry() if r.kind == HOOK_GROUP and f"{r.distribution}:{r.name}" in loaded]
    return [{**ref.provenance(), "kind": "plugins"} for ref in found]


def _bare_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _register_components(manager: pluggy.PluginManager, registry: Registry) -> None:
    for source in sources():
        manager.register(source)
    # Historic: hook modules registered afterwards are called with the same registry.
    manager.hook.slime_register_components.call_historic(kwargs={"registry": registry})


def _selected_hook_modules(registry: Registry) -> list[ComponentRef]:
    """The hook modules SLIME_PLUGINS allows, and slime's own; all of them when it is not set."""
    offers = [ref for ref in registry if ref.kind == HOOK_GROUP]
    allowed = os.environ.get(ALLOW_VARIABLE)
    if allowed is not None:
        words = {word.strip() for word in allowed.split(",") if word.strip()}
        unknown = words - {word for ref in offers for word in _ways_to_name(ref)}
        if unknown:
            known = ", ".join(ref.name for ref in offers) or "none"
            raise PluginError(f"{ALLOW_VARIABLE}: no hook plugin {', '.join(sorted(unknown))}. Installed: {known}")
        offers = [ref for ref in offers if words & set(_ways_to_name(ref)) or ref.distribution == CORE_DISTRIBUTION]
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


def _ways_to_name(ref: ComponentRef) -> tuple[str, str, str]:
    return ref.name, normalized(ref.distribution), f"{ref.distribution}:{ref.name}"


def _register_hook_module(manager: pluggy.PluginManager, ref: ComponentRef) -> None:
    check_compatible(ref)
    subject = ref.label
    try:
        module, _ = load_ref(ref, None, subject)
        plugin = module() if isinstance(module, type) else module
        manager.register(plugin, name=f"{ref.distribution}:{ref.name}")
        manager.check_pending()
    except PluginLoadError as error:
        raise PluginLoadError(f"{error}. To run without it: {ALLOW_VARIABLE}=") from error
    except Exception as error:
        reason = " ".join(str(error).split())  # pluggy's messages have several lines
        raise PluginLoadError(
            f"{subject}: {type(error).__name__}: {reason}. To run without it: {ALLOW_VARIABLE}="
        ) from error


def _print_call(name: str, implementations: Any, arguments: Any) -> None:
    plugins = ", ".join(implementation.plugin_name for implementation in implementations) or "nobody"
    given = ", ".join(f"{key}={value!r:.60}" for key, value in arguments.items())
    print(f"[plugins] {name}({given}) -> {plugins}", file=sys.stderr)


def _print_nothing(outcome: Any, name: str, implementations: Any, arguments: Any) -> None:
    """Results of hooks are not printed."""
