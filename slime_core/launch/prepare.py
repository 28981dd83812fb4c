"""Prepare a run from settings: resolve and check every component, and let a recipe make missing inputs.

Every command that runs something begins with `prepare`, before data or models are loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.checkpoint.sources import Source, find_source, required_source, source_in
from slime_core.checkpoint.store import is_checkpoint
from slime_core.config import Settings
from slime_core.data.tokenizer import load_tokenizer
from slime_core.distributions import BUNDLE, offered, provided
from slime_core.errors import CheckpointError, ConfigError, DataError
from slime_core.launch.checks import check_component_settings, check_routed_model, settle_offload
from slime_core.launch.components import Components, Resolver, resolve_components
from slime_core.launch.ranks import is_leader, processes_of, set_up_process
from slime_core.plugins.hooks import Hooks
from slime_core.plugins.manager import build_manager, current_registry, hook_plugins
from slime_core.plugins.options import check_plugin_options
from slime_core.plugins.registry import Resolved
from slime_core.protocols import TrainerTraits, traits_of
from slime_core.protocols.command import Finding, Level
from slime_core.rollout.evaluate import dataset_args
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.reward import RewardStage, check_named_rewards
from slime_core.rollout.stage import RolloutParts, RolloutStage
from slime_core.waits import waiting

logger = logging.getLogger(__name__)


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
    plugins: list[dict[str, object]]
    """Provenance of every component and hook plugin in use."""
    starting_points: list[str]
    """Lines of text that name the source of the weights of frozen models and the critic."""

    @property
    def args(self) -> Any:
        """Return the values of the settings."""
        return self.settings.args

    def rollout_stage(self, *, draws: bool = True) -> RolloutStage:
        """Build a rollout stage in this process without starting it; without `draws` it can only evaluate.

        Raises:
            ConfigError: The data cannot be used, or a row names an unknown reward.
        """
        args, parts = self.args, self.parts
        rewards = RewardStage(args, parts.reward, self.resolver.reward, workers=self.resolver)
        try:
            source = parts.build_data_source(args) if draws else None
            if parts.engine is not None:
                check_named_rewards(rewards, args, source)
        except DataError as error:  # nothing has begun: an error of the settings, as of a model
            raise ConfigError(str(error)) from error
        runner, timeline = None, offered("slime.metrics", "timeline")
        if args.async_training:
            from slime_core.rollout.event_loop import LoopThread

            runner = LoopThread()
        return RolloutStage(
            args,
            RolloutParts(
                data_source=source,
                rollout_function=parts.rollout_function,
                eval_function=parts.eval_function,
                tokenizer=load_tokenizer(args.hf_checkpoint) if parts.engine is not None else None,
                engine=parts.engine(args) if parts.engine is not None else None,
                generator=parts.generator,
                rewards=rewards,
                filters=FilterStage(args, parts.dynamic_filter, parts.dynamic_filter_name),
                resolve_generator=self.resolver.generator,
                estimator=parts.build_estimator(args),
                post_process_rewards=parts.post_process_rewards,
                convert_samples=parts.convert_samples,
                needs_address=parts.needs_address and not args.sglang_router_port,
                hooks=self.hooks,
                timeline=timeline.open_timeline(args) if draws and timeline else None,
                user=parts.user,
            ),
            runner,
        )


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
    settle_offload(settings, parts)
    _inputs(settings, resolver, make)  # from here on, files that the settings name exist
    points = _check_starting_points(settings, parts.trainer, may_come=bool(args.prepare_path) and not make)
    if settings.args.model is not None:
        provided("slime.api", "check_named_model")(settings)
    check_routed_model(settings)
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
        provided("slime.api", "inputs_by_recipe")(settings, resolver, make=make)
    if make and is_leader() and (layouts := offered("slime.data", "layouts")) is not None:
        for line in layouts.in_words(args):
            print(line, flush=True)


_STEPS = {"load": "ckpt_step", "ref_load": "ref_ckpt_step", "opd_teacher_load": "opd_teacher_ckpt_step"}
_USED = {"ref_load": "reference", "opd_teacher_load": "teacher", "critic_load": "critic"}


def _check_starting_points(settings: Settings, trainer: object, *, may_come: bool) -> list[str]:
    """Check every model directory that the settings name.

    Args:
        settings: Settings of the run.
        trainer: Class of the trainer; None for a run that does not train.
        may_come: A recipe has yet to create the directories, so a missing directory is not an error.

    Returns:
        One line each for reference, teacher and critic: the directory used and the model found in it.

    Raises:
        ConfigError: A directory has no model, or its format cannot be read.
        CheckpointError: A named commit is torn or missing.
    """
    args = settings.args
    _check_steps(settings)
    if args.hf_checkpoint and not may_come:
        _check_hf(settings)
    told = []
    for name, role in _USED.items():
        path, step = getattr(args, name), getattr(args, _STEPS.get(name, ""), None)
        if not path or path == args.hf_checkpoint or (may_come and find_source(path) is None):
            continue
        source = _named_source(settings, trainer, name, step, folder="critic" if role == "critic" else None)
        told.append(f"{role}: weights of {source.directory}, {source}")
    if args.initial_megatron_checkpoint and not may_come:
        _named_source(settings, trainer, "initial_megatron_checkpoint")
    if args.load and not is_checkpoint(args.load) and (loaded := source_in(Path(args.load))) is not None:
        _check_format(settings, "load", loaded, trainer)  # `launch/resume.py` checks commits
    return told


def _named_source(
    settings: Settings, trainer: object, name: str, step: int | None = None, folder: str | None = None
) -> Source:
    """Return the model that a setting names. Raises ConfigError if the trainer reads no such model."""
    try:
        source = required_source(getattr(settings.args, name), step, cite=settings.cite(name), folder=folder)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    _check_format(settings, name, source, trainer)
    return source


def _check_steps(settings: Settings) -> None:
    for name, step in _STEPS.items():
        if getattr(settings.args, step) is not None and not settings.is_given(name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{settings.cite(step)} chooses a commit of {flag}, which is not given.")


def _check_hf(settings: Settings) -> None:
    path = str(settings.args.hf_checkpoint)
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{settings.cite('hf_checkpoint')}: no HF-layout model there (no config.json)")
    source = find_source(path)
    if source is not None and not source.has_hf:
        raise ConfigError(
            f"{settings.cite('hf_checkpoint')}: its weights are in Megatron's format, which engines cannot read; name"
            " the HF model, or type slime convert megatron-to-hf"
        )


def _check_format(settings: Settings, name: str, source: Source, trainer: object) -> None:
    if not source.has_hf and not traits_of(trainer, TrainerTraits).reads_megatron:
        raise ConfigError(
            f"{settings.cite(name)}: is {source}, which {settings.cite('train_backend')} does not read; type slime"
            " convert megatron-to-hf, or --train-backend megatron"
        )


def preflight(run: Prepared) -> list[Finding]:
    """Return the findings of all plugins (hook `slime_preflight`) for a run with valid settings and components."""
    with waiting("the checks before the run", deadline=None, then="each has a deadline of its own"):
        told: list[Iterable[Finding]] = run.hooks.slime_preflight(run=run)
        return [finding for findings in told for finding in findings]


def run_preflight(run: Prepared) -> None:
    """Run the preflight checks and log warnings. Raises ConfigError with every error found."""
    if not run.hooks.implemented("slime_preflight"):
        logger.warning("nothing installed checks a run before it starts; slime's checks: pip install %s", BUNDLE)
    findings = preflight(run)
    for finding in findings:
        if finding.level == Level.WARNING:
            logger.warning("%s: %s", finding.subject, finding.message)
    errors = [f for f in findings if f.level == Level.ERROR]
    if errors:
        lines = [f"{f.subject}: {f.message}" for f in errors]
        raise ConfigError("\n".join([*lines, "(`slime check` prints the whole report; --no-preflight goes on)"]))
