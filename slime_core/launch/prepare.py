"""Settings -> a run that can start: every component resolved and checked, and inputs that a recipe makes there.

Every command that runs something begins with `prepare`; nothing is loaded yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_core.config import Settings
from slime_core.launch.component_settings import check_component_settings
from slime_core.launch.components import Components, resolve_components
from slime_core.launch.inputs import make_inputs, tell_columns
from slime_core.launch.named_model import check_named_model
from slime_core.launch.offload import settle_offload
from slime_core.launch.process import is_leader, set_up_process
from slime_core.launch.ranks import processes_of
from slime_core.launch.resolver import Resolver
from slime_core.launch.rollout_factory import build_rollout
from slime_core.launch.routing import check_routing_replay
from slime_core.launch.starting_points import check_starting_points
from slime_core.plugins.hooks import Hooks
from slime_core.plugins.manager import build_manager, current_registry, hook_plugins, hook_provenance
from slime_core.plugins.options import Used, check_plugin_options
from slime_core.rollout.eval_record import EvalRecord
from slime_core.rollout.evaluate import dataset_args
from slime_core.rollout.loop_thread import LoopThread
from slime_core.rollout.stage import RolloutStage
from slime_core.waits import waiting


@dataclass
class Prepared:
    """Settings and components of a run whose inputs exist."""

    settings: Settings
    parts: Components
    resolver: Resolver
    hooks: Hooks
    """Those of installed plugins, and the functions that settings name."""
    processes: int
    """That train together; more than there are now where the launcher has yet to start them."""
    plugins: list[dict[str, Any]]
    """Provenance of every component and hook plugin in use."""
    starting_points: list[str]
    """Where the weights of frozen models and the critic come from, in words."""

    @property
    def args(self) -> Any:
        """The settings' values."""
        return self.settings.args

    def rollout_stage(
        self, *, draws: bool = True, runner: LoopThread | None = None, eval_record: EvalRecord | None = None
    ) -> RolloutStage:
        """A rollout stage in this process, not yet started; without `draws` it can only evaluate.

        With `runner`, which turns its event loop, several threads may call it at once. `eval_record` is where an
        evaluation that can be resumed keeps what it has done.
        """
        parts = self.args, self.parts, self.resolver, self.hooks
        return build_rollout(*parts, draws=draws, runner=runner, eval_record=eval_record)


def prepare(settings: Settings, *, learn: bool = True, make: bool = True) -> Prepared:
    """Resolve every component, then let the recipe make missing inputs (with `make`; without, they may be missing).

    Raises:
        ConfigError: A setting is wrong.
        PluginError: A component is.
    """
    with waiting("loading plugins", deadline=None, then="as long as it takes"):
        return _prepare(settings, learn, make)


def _prepare(settings: Settings, learn: bool, make: bool) -> Prepared:
    args = settings.args
    set_up_process(args)
    manager = build_manager(args)
    parts, resolver = resolve_components(settings, manager, learn=learn)
    used = [Used(r.ref, r.obj) for r in resolver.used] + [Used(*pair) for pair in hook_plugins(manager)]
    check_plugin_options(args, current_registry(), str(settings.origins["plugins"]), used)
    for dataset in args.eval_datasets:
        if dataset.plugins:
            origin = f"evaluation data set {dataset.name!r}"
            check_plugin_options(dataset_args(args, dataset), current_registry(), origin, used)
    parts.hooks.slime_configure(args=args)
    check_component_settings(settings, parts)
    settle_offload(settings, parts)
    if args.prepare_path and make:
        make_inputs(settings, resolver)
    elif args.prepare_path:
        resolver.function("recipes", "prepare_path")
    if make and is_leader():
        for line in tell_columns(args):
            print(line, flush=True)
    told = check_starting_points(settings, parts.trainer, may_come=bool(args.prepare_path) and not make)
    check_named_model(settings)
    check_routing_replay(settings, parts)
    processes = processes_of(settings, parts.trainer)
    plugins = [*parts.provenance(), *hook_provenance(manager)]
    return Prepared(settings, parts, resolver, parts.hooks, processes, plugins, told)
