"""The contract of hook plugins: modules that are told what happens in a run (`slime_core.plugins.hookspecs`)."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pluggy
import pytest

from slime_core.distributions import normalized
from slime_core.errors import PluginNotFoundError
from slime_core.plugins import hookspecs
from slime_core.plugins.kinds import HOOK_GROUP
from slime_core.plugins.manager import current_registry, load_hook_module
from slime_core.plugins.registry import ComponentRef
from slime_core.testing.contracts.base import Contract


class HookPluginContract(Contract):
    """It loads, knows only hooks that slime calls, and its hooks are plain functions."""

    kind = HOOK_GROUP

    @property
    def ref(self) -> ComponentRef:
        """The entry point in `slime.plugins` that `component` names: its name, or `distribution:name`."""
        distribution, _, name = self.component.rpartition(":")
        for ref in current_registry():
            right = not distribution or normalized(ref.distribution) == normalized(distribution)
            if ref.kind == HOOK_GROUP and ref.name == name and right:
                return ref
        known = ", ".join(ref.name for ref in current_registry() if ref.kind == HOOK_GROUP)
        raise PluginNotFoundError(
            f"no hook plugin {self.component!r}; a hook plugin is found by its name in the entry-point group"
            f" {HOOK_GROUP!r} of an installed distribution. There are: {known or 'none'}"
        )

    @property
    def plugin(self) -> Any:
        """The module, or the instance of the class."""
        return load_hook_module(self.ref)[1]

    def hooks(self) -> dict[str, Any]:
        """Hook -> the plugin's implementation."""
        manager, plugin = pluggy.PluginManager(hookspecs.PROJECT), self.plugin
        manager.add_hookspecs(hookspecs)
        manager.register(plugin)
        callers = manager.get_hookcallers(plugin) or []
        return {caller.name: caller.get_hookimpls()[0].function for caller in callers}

    def load(self) -> None:
        """Raises SlimeError, also for a hook that slime does not know."""
        load_hook_module(self.ref)

    def check_options(self) -> None:
        """They are the run's to check, with all plugins that share them."""

    def test_it_has_hooks(self) -> None:
        """At least one function marked `@slime_core.hookimpl`."""
        known = [name for name in vars(hookspecs) if name.startswith("slime_")]
        assert self.hooks(), f"no function is marked @slime_core.hookimpl; slime calls {', '.join(known)}"

    def test_its_hooks_are_plain_functions(self) -> None:
        """Nobody awaits them."""
        wrong = [name for name, function in self.hooks().items() if inspect.iscoroutinefunction(function)]
        assert not wrong, f"hooks are plain functions on the loop's thread; these are async: {', '.join(wrong)}"

    def test_its_state_can_be_stored(self) -> None:
        """`slime_save_state`, where there is one, answers JSON values under a key of its own, or None."""
        save = self.hooks().get("slime_save_state")
        if save is None:
            pytest.skip("it keeps no state")
        state = save()
        assert state is None or isinstance(state, dict), f"expected a mapping or None; found {type(state).__name__}"
        json.dumps(state)
