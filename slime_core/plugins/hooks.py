"""The hooks of a process: their specifications, their implementations, and the functions that flags name.

`manager.build_manager` registers the installed hook plugins, then `launch.components` registers the functions that
flags name. Code that calls a hook holds a `Hooks`. The functions of flags run last, in the order given, so that a run's
own flags take precedence over installed plugins.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pluggy

from slime_core.errors import PluginLoadError
from slime_core.plugins.hookspecs import PROJECT, hookimpl
from slime_core.plugins.kind import Kind
from slime_core.plugins.kinds import hook_flags, spec_modules
from slime_core.plugins.signatures import declared, is_async
from slime_core.protocols import EditTraits, traits_of
from slime_core.workers.call import guarded

logger = logging.getLogger(__name__)


@functools.cache
def hook_specs() -> Mapping[str, Callable[..., object]]:
    """Return the declaration of each hook, by name."""
    members = [pair for module in spec_modules() for pair in vars(module).items()]
    return {name: value for name, value in members if name.startswith("slime_")}


def bare_manager() -> pluggy.PluginManager:
    """Return a plugin manager that has every hook specification and no implementation."""
    manager = pluggy.PluginManager(PROJECT)
    for module in spec_modules():
        manager.add_hookspecs(module)
    return manager


class _Function:
    """The pluggy plugin of a function behind a flag: anonymous, and called after all others."""

    def __init__(self, hook: str, function: Callable[..., object]) -> None:
        setattr(self, hook, hookimpl(trylast=True)(function))


def as_plugin(row: Kind, function: Callable[..., object]) -> object:
    """Wrap a function with THUDM/slime's positional arguments, checked by `resolve`, as a plugin with that hook."""
    spec = hook_specs()[row.name]
    names = list(inspect.signature(spec).parameters)
    call = row.calls[0]
    keywords = declared(function, call.keywords)

    def told(*values: object) -> object:
        given = dict(zip(names, values))
        return function(*(given[name] for name in call.positional), **{name: given[name] for name in keywords})

    functools.update_wrapper(told, spec, assigned=(), updated=())  # pluggy reads the parameter names from the spec
    if row.traits is not None:
        vars(told)["traits"] = traits_of(function, row.traits, row.flags[0])
    return _Function(row.name, told)


def implement(manager: pluggy.PluginManager, row: Kind, function: Callable[..., object], label: str) -> None:
    """Register the function of a flag; `label` is its name in errors."""
    plugin, name = as_plugin(row, function), label
    while manager.has_plugin(name):  # a function may be given twice
        name += " again"
    manager.register(plugin, name=name)
    guard(manager, plugin, lambda _: label)


def guard(manager: pluggy.PluginManager, plugin: object, label: Callable[[str], str]) -> None:
    """Make errors of a registered plugin's hooks name the plugin; `label` is called with the hook's name.

    Raises:
        PluginLoadError: A hook that is never awaited is `async`, or a hook wraps others although each is called alone.
    """
    known = [caller for caller in manager.get_hookcallers(plugin) or () if caller.name in hook_specs()]
    for caller in known:  # others are marked optional, such as hooks of a trainer that is not installed
        named, row = label(caller.name), hook_flags().get(caller.name)
        returns = inspect.signature(hook_specs()[caller.name]).return_annotation
        for one in caller.get_hookimpls():
            wraps, awaited = one.wrapper or one.hookwrapper, row is not None and row.may_wait
            if one.plugin is not plugin or (wraps and not awaited):
                continue
            if wraps:
                raise PluginLoadError(f"{named} wraps other plugins, but each is called alone; make it a plain hook")
            if awaited:
                continue  # its error fails the sample
            if is_async(one.function):
                raise PluginLoadError(f"{named} is `async`, but its result is not awaited; make it a plain `def`")
            function = guarded(one.function, named)
            one.function = _unused(function, named) if returns == "None" else function  # type: ignore[misc]


def _unused(function: Callable[..., object], label: str) -> Callable[..., object]:
    """Warn once if the function returns a value."""
    warned = False

    @functools.wraps(function)
    def call(*values: object) -> None:
        nonlocal warned
        answer = function(*values)
        if answer is not None and not warned:
            warned = True
            logger.warning(
                "%s returned %s, which has no effect; what may be changed is changed in place",
                label, type(answer).__name__,
            )  # fmt: skip

    return call


class Hooks:
    """pluggy's hook relay: `hooks.slime_step_end(rollout_id=0, metrics={})` returns the results that are not None."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager

    def implemented(self, name: str) -> bool:
        """Return whether any plugin implements this hook."""
        return bool(getattr(self._manager.hook, name).get_hookimpls())

    def caller(self, name: str) -> Callable[..., list[Any]] | None:
        """Return the function that calls the hook; None if no plugin implements it."""
        return getattr(self, name) if self.implemented(name) else None

    def each(self, name: str) -> list[tuple[str, Callable[..., list[Any]], bool]]:
        """Return the plugins that implement the hook, in call order.

        Each entry has the label, a function that calls this plugin only, and whether the plugin may edit samples.

        Raises:
            PluginError: A plugin declares traits that are not the traits of its hook.
        """
        found: list[tuple[str, Callable[..., list[object]], bool]] = []
        told = {one.plugin: one.function for one in reversed(getattr(self._manager.hook, name).get_hookimpls())}
        for plugin, function in told.items():
            known = str(self._manager.get_name(plugin))
            label = known if isinstance(plugin, _Function) else f"hook plugin {known!r}"
            others = [other for other in told if other is not plugin]
            edits = traits_of(function, EditTraits, label).edits_samples
            found.append((label, self._manager.subset_hook_caller(name, others), edits))
        return found

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        # `lasting`: each implementation has its own deadline (`guard`).
        return guarded(getattr(self._manager.hook, name), f"a plugin's hook {name}", lasting=True)


@functools.cache
def nobody() -> Hooks:
    """Return hooks without any plugin."""
    return Hooks(bare_manager())
