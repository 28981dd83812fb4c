"""Resolve the specs of one run to objects, and record each object with the setting that named it."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pluggy

from slime_core.config import Settings
from slime_core.distributions import BUNDLE, installed
from slime_core.errors import ConfigError, PluginNotFoundError
from slime_core.plugins.adapters import GenerateCaller, RewardCaller
from slime_core.plugins.hooks import Hooks, implement
from slime_core.plugins.kinds import hook_flags, kind_of
from slime_core.plugins.manager import current_registry
from slime_core.plugins.options import option_name
from slime_core.plugins.registry import Resolved
from slime_core.plugins.resolve import absolute_spec, resolve, with_list_function
from slime_core.plugins.signatures import constructor_values
from slime_core.protocols import RewardTraits, traits_of
from slime_core.workers.call import guarded

if TYPE_CHECKING:
    from slime_core.workers.pool import WorkerPool

DEFAULTS = {
    "data_source_path": "dataset",
    "rollout_function_path": "generate",
    "custom_generate_function_path": "single_turn",
    "buffer_filter_path": "fifo",
}
"""Default component names of settings that are not given."""


_OF_THE_BUNDLE = {
    "custom_generate_function_path": "generators",
    "buffer_filter_path": "buffers",
    "advantage_estimator": "estimators",
    "dynamic_sampling_filter_path": "filters",
    "rm_type": "rewards",
    "custom_rm_path": "rewards",
}
"""Setting -> kind, for kinds whose own components are in the bundle and not in the core."""


class Resolver:
    """Resolve the specs of one run, and record the components used and the origin of each spec."""

    def __init__(self, settings: Settings) -> None:
        self.args = settings.args
        self._settings = settings
        self.command = settings.command
        self.used: list[Resolved] = []
        self._workers: WorkerPool | None = None

    def need_bundle(self) -> None:
        """Raise PluginNotFoundError if the run needs several components of the bundle and it is not installed."""
        if installed(BUNDLE) is not None:
            return
        registry = current_registry()
        wanted = [(kind, getattr(self.args, name) or DEFAULTS.get(name)) for name, kind in _OF_THE_BUNDLE.items()]
        named = [(kind, name) for kind, name in wanted if name and name.isidentifier()]
        lacking = [
            (kind, name)
            for kind, name in named
            if name not in registry.names(kind) and not name.startswith(tuple(kind_of(kind).prefixes))
        ]
        if len(lacking) > 1:
            shown = ", ".join(f"{kind}/{name}" for kind, name in lacking)
            raise PluginNotFoundError(f"the run needs plugins that are not installed: {shown}; pip install {BUNDLE}")

    def setting(self, kind: str, name: str) -> Any:
        """Return the object that setting `name` (or its default) selects, or None if it selects nothing."""
        spec = self.named(name)
        return None if spec is None else self.spec(kind, spec, self.origin(name)).obj

    def function(self, kind: str, name: str) -> Any:
        """Return the plain function that setting `name` selects; its later errors name the setting."""
        found = self.setting(kind, name)
        lasting = kind in ("rollouts", "recipes")
        return None if found is None else guarded(found, f"{self.origin(name)} {self.named(name)!r}", lasting=lasting)

    def each(self, kind: str, name: str) -> list[tuple[Any, str]]:
        """Return (function, label for errors) of every function that setting `name` lists, in order."""
        given = getattr(self.args, name) or []
        specs = [absolute_spec(spec) for spec in ([given] if isinstance(given, str) else given)]
        if given:
            setattr(self.args, name, specs[0] if isinstance(given, str) else specs)
        return [(self.spec(kind, spec, self.origin(name)).obj, f"{self.origin(name)} {spec!r}") for spec in specs]

    def hooks(self, manager: pluggy.PluginManager, *, learn: bool) -> Hooks:
        """Return the process's hooks plus the functions named by settings; `learn` includes training hooks."""
        for row in hook_flags().values():
            if learn or not row.trains:
                for function, label in self.each(row.name, row.setting):
                    implement(manager, row, function, label)
        return Hooks(manager)

    def named(self, name: str) -> str | None:
        """Return the spec in setting `name` or its default; a file path is made absolute for other processes."""
        spec: str | None = getattr(self.args, name)
        if spec:
            spec = absolute_spec(spec)
            setattr(self.args, name, spec)
        return spec or DEFAULTS.get(name)

    def origin(self, name: str) -> str:
        """Return `--flag (origin of its value)`, for error messages."""
        return f"--{name.replace('_', '-')} ({self._settings.origins[name]})"

    def spec(self, kind: str, spec: str, origin: str) -> Resolved:
        """Resolve a spec and record the result."""
        resolved = resolve(kind, spec, origin=origin)
        if inspect.isclass(resolved.obj) and kind_of(kind).by_name:
            try:
                constructor_values(resolved.obj, self.args, name=option_name(resolved.ref), dataset=None)
            except ConfigError as error:
                raise ConfigError(f"{origin}: {error}") from None
        self.used.append(resolved)
        return resolved

    def reward(self, spec: str, origin: str = "sample.custom_rm_path") -> RewardCaller:
        """Return the caller of a reward function."""
        spec = absolute_spec(spec)
        if self.args.group_rm:
            spec = with_list_function("rewards", spec, origin)
        resolved = self.spec("rewards", spec, origin)
        workers = None if self.args.rm_workers == 0 else self.workers
        caller = RewardCaller(resolved, self.args, workers=workers, spec=spec, group=self.args.group_rm)
        self.used += [replace(member, origin=f"{origin} {spec!r}") for member in caller.members]
        for found in (resolved, *caller.members):
            if check := traits_of(found.obj, RewardTraits).check:
                check(self.args, training=self.command != "eval")
        return caller

    def workers(self) -> WorkerPool:
        """The worker processes of plain rewards; they start at the first call."""
        if self._workers is None:
            from slime_core.workers.pool import WorkerPool

            size = min(4, os.cpu_count() or 1) if self.args.rm_workers is None else self.args.rm_workers
            self._workers = WorkerPool(self.args, size, memory_limit=self.args.rm_memory_limit)
        return self._workers

    def settings_changed(self) -> None:
        """Send the current settings to the worker processes of rewards."""
        if self._workers is not None:
            self._workers.settings_changed()

    def close(self) -> None:
        """End the worker processes of rewards. Safe to call twice."""
        if self._workers is not None:
            self._workers.close()

    def generator(self, spec: str, origin: str = "sample.generate_function_path") -> GenerateCaller:
        """Return the caller of a generate function."""
        return GenerateCaller(self.spec("generators", spec, origin))

    def provenance(self) -> list[dict[str, Any]]:
        """Return name, distribution, version and source hash of every component in use, without duplicates."""
        facts = {(p["kind"], p["name"]): p for p in (found.ref.provenance() for found in self.used)}
        return [facts[key] for key in sorted(facts)]
