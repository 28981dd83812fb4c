"""Settings -> a run that can start: every component resolved and checked, and inputs that a recipe makes there.

Every command that runs something begins with `prepare`; nothing is loaded yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.config import Settings
from slime_core.errors import ConfigError
from slime_core.launch.component_settings import check_component_settings
from slime_core.launch.components import Components, resolve_components
from slime_core.launch.inputs import make_inputs
from slime_core.launch.process import set_up_process
from slime_core.launch.resolver import Resolver
from slime_core.launch.rollout_factory import build_rollout
from slime_core.launch.routing import check_routing_replay
from slime_core.plugins.boundary import GuardedHooks
from slime_core.plugins.manager import build_manager, current_registry, hook_plugins, hook_provenance
from slime_core.plugins.options import Used, check_plugin_options
from slime_core.rollout.stage import RolloutStage


@dataclass
class Prepared:
    """Settings and components of a run whose inputs exist."""

    settings: Settings
    parts: Components
    resolver: Resolver
    hooks: Any
    """pluggy's hook relay."""
    plugins: list[dict[str, Any]]
    """Provenance of every component and hook plugin in use."""

    @property
    def args(self) -> Any:
        """The settings' values."""
        return self.settings.args

    def rollout_stage(self, *, draws: bool = True) -> RolloutStage:
        """A rollout stage in this process, not yet started; without `draws` it can only evaluate."""
        return build_rollout(self.args, self.parts, self.resolver, self.hooks, draws=draws)


def prepare(settings: Settings, *, learn: bool = True, make: bool = True) -> Prepared:
    """Resolve every component, then let the recipe make missing inputs (with `make`; without, they may be missing).

    Raises:
        ConfigError: A setting is wrong.
        PluginError: A component is.
    """
    args = settings.args
    set_up_process(args)
    manager = build_manager(args)
    hooks = GuardedHooks(manager.hook)
    parts, resolver = resolve_components(settings, learn=learn)
    used = [Used(r.ref, r.obj) for r in resolver.used] + [Used(*pair) for pair in hook_plugins(manager)]
    check_plugin_options(args, current_registry(), str(settings.origins["plugins"]), used)
    hooks.slime_configure(args=args)
    check_component_settings(settings, parts)
    if args.prepare_path and make:
        make_inputs(settings, resolver)
    elif args.prepare_path:
        resolver.function("recipes", "prepare_path")
    for name in ("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load"):
        path = getattr(args, name)
        may_come = bool(args.prepare_path) and not make
        if path and not may_come and not (Path(path) / "config.json").is_file():
            raise ConfigError(f"{settings.cite(name)}: no HF-layout model there (no config.json)")
    check_routing_replay(settings, parts)
    return Prepared(settings, parts, resolver, hooks, [*parts.provenance(), *hook_provenance(manager)])
