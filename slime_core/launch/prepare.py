"""Prepare a run from settings: resolve and check every component, and let a recipe make missing inputs.

Every command that runs something begins with `prepare`, before data or models are loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config import Settings
from slime_core.config.spec import flag_specs
from slime_core.data.dataset import open_rows, split_path
from slime_core.data.rows import Columns, recognised
from slime_core.errors import ConfigError, DataError
from slime_core.launch.component_settings import check_component_settings
from slime_core.launch.components import Components, resolve_components
from slime_core.launch.lock import file_lock
from slime_core.launch.process import is_leader, processes_of, set_up_process
from slime_core.launch.resolver import Resolver
from slime_core.launch.rollout_factory import build_rollout
from slime_core.launch.starting_points import check_named_model, check_starting_points
from slime_core.models.config import read_hf_config
from slime_core.plugins.hooks import Hooks
from slime_core.plugins.manager import build_manager, current_registry, hook_plugins
from slime_core.plugins.options import check_plugin_options
from slime_core.plugins.registry import Resolved
from slime_core.protocols import Args, EngineTraits, TrainerTraits, traits_of
from slime_core.rollout.evaluate import dataset_args
from slime_core.rollout.stage import RolloutStage
from slime_core.waits import part_of_start, waiting

if TYPE_CHECKING:
    from slime_core.rollout.event_loop import LoopThread


@dataclass
class Prepared:
    """Settings and components of a run whose inputs exist."""

    settings: Settings
    parts: Components
    resolver: Resolver
    hooks: Hooks
    """Hooks of installed plugins, and the hook functions that settings name."""
    processes: int
    """Number of processes that train together, including those that the launcher has yet to start."""
    plugins: list[dict[str, Any]]
    """Provenance of every component and hook plugin in use."""
    starting_points: list[str]
    """Lines of text that name the source of the weights of frozen models and the critic."""

    @property
    def args(self) -> Any:
        """Return the values of the settings."""
        return self.settings.args

    def rollout_stage(self, *, draws: bool = True, runner: LoopThread | None = None) -> RolloutStage:
        """Build a rollout stage in this process without starting it; without `draws` it can only evaluate.

        With `runner`, which runs its event loop, several threads may call the stage at once.
        """
        parts = self.args, self.parts, self.resolver, self.hooks
        return build_rollout(*parts, draws=draws, runner=runner)


def prepare(settings: Settings, *, learn: bool = True, make: bool = True) -> Prepared:
    """Resolve every component. With `make`, let the recipe make missing inputs; without, inputs may be missing.

    Raises:
        ConfigError: A setting is wrong.
        PluginError: A component is wrong.
    """
    with waiting("loading plugins", deadline=None, then="as long as it takes"):
        return _prepare(settings, learn, make)


def _prepare(settings: Settings, learn: bool, make: bool) -> Prepared:
    """Run the steps in order; each step uses the results of earlier steps and may add to the settings."""
    args, directory = settings.args, os.getcwd()
    set_up_process(args)
    manager = build_manager(args)
    parts, resolver = resolve_components(settings, manager, learn=learn)
    told = hook_plugins(manager)
    _check_options(settings, [*resolver.used, *told])
    parts.hooks.slime_configure(args=args)
    check_component_settings(settings, parts)
    if args.offload_train or args.offload_rollout:
        from slime_core.launch.offload import settle_offload

        settle_offload(settings, parts)
    _inputs(settings, resolver, make)  # from here on, files that the settings name exist
    points = check_starting_points(settings, parts.trainer, may_come=bool(args.prepare_path) and not make)
    check_named_model(settings)
    check_routing_replay(settings, parts)
    processes = processes_of(settings, parts.trainer)
    derived = args.max_tokens_per_gpu and not settings.is_given("max_tokens_per_gpu")
    if derived and hasattr(parts.trainer, "tokens_that_fit"):
        settings.derive("max_tokens_per_gpu", parts.trainer.tokens_that_fit(args, processes), "memory")
    settings.settle_paths(directory)
    plugins = [*resolver.provenance(), *({**plugin.ref.provenance(), "kind": "plugins"} for plugin in told)]
    return Prepared(settings, parts, resolver, parts.hooks, processes, plugins, points)


def _check_options(settings: Settings, used: Sequence[Resolved]) -> None:
    """Check the plugin options of the run, and of evaluation data sets that have their own."""
    args = settings.args
    check_plugin_options(args, current_registry(), str(settings.origins["plugins"]), used)
    for dataset in args.eval_datasets:
        if dataset.plugins:
            origin = f"evaluation data set {dataset.name!r}"
            check_plugin_options(dataset_args(args, dataset), current_registry(), origin, used)


def _inputs(settings: Settings, resolver: Resolver, make: bool) -> None:
    args = settings.args
    if args.prepare_path:
        _check_made_inputs(settings)
    if args.prepare_path and make:
        make_inputs(settings, resolver)
    elif args.prepare_path:
        resolver.function("recipes", "prepare_path")
    if make and is_leader():
        for line in columns_in_words(args):
            print(line, flush=True)


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def _check_made_inputs(settings: Settings) -> None:
    """Raise ConfigError if the recipe would make a missing input that was not named together with the recipe.

    A run file names its recipe and the recipe's paths. A model or data set that is named elsewhere, for example by a
    flag, is the user's own, and the recipe must not replace it. A recipe that a flag names makes all missing inputs.
    """
    args = settings.args
    paths = {"hf_checkpoint": [args.hf_checkpoint or ""], "prompt_data": [args.prompt_data or ""]}
    paths["eval_prompt_data"] = list(args.eval_prompt_data or [])[1::2]
    recipe = settings.origins["prepare_path"]
    for name, named in paths.items():
        origin = settings.origins[name]
        for path in filter(None, named):
            model = name == "hf_checkpoint"
            there = (Path(path) / "config.json").is_file() if model else split_path(path)[0].exists()
            if there or not settings.is_given(name):
                continue
            cited = f"{flag_specs()[name].flag} {path} ({origin})"
            if model and Path(path).exists() and not (Path(path).is_dir() and not os.listdir(path)):
                raise ConfigError(
                    f"{cited} is there and holds no model (no config.json), so --prepare-path {args.prepare_path} makes"
                    " none there. Name a model directory, or a new or empty one"
                )
            if model and _HUB_ID.fullmatch(path):
                raise ConfigError(
                    f"{cited} is not there, and looks like a model of the Hugging Face hub, which slime does not"
                    f" download: hf download {path} --local-dir {path}. To have --prepare-path {args.prepare_path} make"
                    f" a model there, name it ./{path}"
                )
            together = (origin.kind, origin.where.rpartition(":")[0]) == (recipe.kind, recipe.where.rpartition(":")[0])
            if recipe.kind != "flag" and not together:
                raise ConfigError(
                    f"{cited} is not there, and --prepare-path {args.prepare_path} ({recipe}) makes only what is named"
                    f" together with it. Name {'a model directory' if model else 'a file'} that is there; to have it"
                    f" made, type --prepare-path {args.prepare_path} as well"
                )


LOCK_DEADLINE = 3600.0
"""Seconds to wait for another process's preparation."""


def make_inputs(settings: Settings, resolver: Resolver) -> None:
    """Run the recipe under the lock. Raises ConfigError if another process holds the lock for too long.

    Every process (all ranks under torchrun, two runs that share inputs) takes the same lock and calls the recipe. The
    first process makes the inputs, the others find them. So a recipe must be idempotent. It may set
    `args.hf_checkpoint` if it writes the model to another directory.
    """
    args = settings.args
    named = args.hf_checkpoint
    recipe = resolver.function("recipes", "prepare_path")
    refusal = f"--prepare-path: another process has been preparing the inputs for {LOCK_DEADLINE:.0f} s; end it first"
    lock = file_lock(Path(f"{named or args.run_dir}.lock"), deadline=LOCK_DEADLINE, refusal=refusal)
    with lock, part_of_start():
        recipe(args)
    if args.hf_checkpoint != named:
        if args.ref_load == named:
            settings.derive("ref_load", args.hf_checkpoint, "hf_checkpoint")
        settings.derive("hf_checkpoint", args.hf_checkpoint, f"prepare_path, instead of {named}")


def columns_in_words(args: Args) -> list[str]:
    """Return a line per data set with recognised columns; skip missing files and data with only an `input` column."""
    sets = []
    if args.prompt_data and args.rollout_global_dataset and not args.data_source_path:
        sets.append((args.prompt_data, Columns.of_run(args), "--prompt-data"))
    sets += [(d.path, Columns.of_eval(d, args), f"evaluation data set {d.name!r}:") for d in args.eval_datasets]
    lines = []
    for spec, columns, origin in sets:
        if columns.input is not None or not split_path(spec)[0].is_file():
            continue
        with suppress(DataError):  # the data source reports unreadable data, if it is ever read
            rows = open_rows(spec, origin, stream=split_path(spec)[1] == slice(None))  # the first rows tell
            with closing(rows):
                layout = recognised(rows, columns)
            if layout is not None and (layout.prompt != "input" or layout.answer):
                lines.append(f"columns of {spec}: {layout}")
    return lines


# By config.json alone, since a trainer may know families that no plugin here describes.
_NUMBER_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of this field in HF configurations."""


def check_routing_replay(settings: Settings, parts: Components) -> None:
    """Check that engine, trainer, loss and model support routing replay.

    Raises:
        ConfigError: One of them does not.
    """
    args = settings.args
    if not args.use_routing_replay:
        return
    asked = "use_rollout_routing_replay" if args.use_rollout_routing_replay else "use_routing_replay"
    if parts.trainer is not None:
        if not traits_of(parts.trainer, TrainerTraits).routing_replay:
            raise ConfigError(
                f"{settings.cite(asked)}: {settings.cite('train_backend')} cannot replay routing (its traits do not say"
                " `routing_replay`); choose another --train-backend"
            )
        if parts.loss.needs_advantages is False:
            raise ConfigError(
                f"{settings.cite(asked)}: --loss-type {args.loss_type!r} has no log-prob pass and no rollout to repeat;"
                " it works with policy_loss"
            )
    engine = parts.engine
    tells = traits_of(engine, EngineTraits).returns_routed_experts
    if args.use_rollout_routing_replay and engine is not None and not tells:
        raise ConfigError(
            f"{settings.cite(asked)}: {settings.cite('rollout_engine')} does not say which experts it used (its traits"
            " do not say `returns_routed_experts`); choose another --rollout-engine, or --use-routing-replay alone"
        )
    checkpoint = str(args.hf_checkpoint)
    if (Path(checkpoint) / "config.json").is_file():
        hf = read_hf_config(checkpoint)
        text = hf.get("text_config") or {}
        if not any(part.get(name) for part in (hf, text) for name in _NUMBER_OF_EXPERTS):
            raise ConfigError(
                f"{settings.cite(asked)}: {settings.cite('hf_checkpoint')} is a dense model"
                f" ({hf['model_type']}: no {', '.join(_NUMBER_OF_EXPERTS)} in config.json); remove the flag"
            )
