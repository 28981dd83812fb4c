"""Resolve and signature-check all components that the settings name, before anything is started.

`Resolver` turns the specs of one run into objects, and records each object with the setting that named it.

Every launcher calls `resolve_components` first. An unknown name, a typo in a path or a wrong signature ends the
command here, with one line that names the setting.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pluggy

from slime_core.config import Settings
from slime_core.data.tools import AUTO, run_tools
from slime_core.distributions import BUNDLE, installed, provided
from slime_core.errors import ConfigError, PluginNotFoundError, name_of
from slime_core.launch.checks import check_components, warn_without_effect
from slime_core.launch.roles import Trainers
from slime_core.plugins.adapters import GenerateCaller, RewardCaller, Workers
from slime_core.plugins.hooks import Hooks, bare_manager, implement, nobody
from slime_core.plugins.kinds import hook_flags, kind_of
from slime_core.plugins.manager import current_registry
from slime_core.plugins.options import option_name
from slime_core.plugins.registry import Resolved
from slime_core.plugins.resolve import absolute_spec, resolve, with_list_function
from slime_core.plugins.signatures import construct, constructor_values, declared
from slime_core.protocols import Args, RewardTraits, RolloutTraits, traits_of, with_defaults
from slime_core.rollout.evaluate import dataset_args
from slime_core.rollout.hooks import RolloutHooks
from slime_core.weights.sync import NO_NAMES, transport_traits
from slime_core.workers.call import guarded, user_code

if TYPE_CHECKING:
    from slime_core.config.sections.evaluation import EvalDataset
    from slime_core.estimator import AdvantageFn, EstimatorBase
    from slime_core.learning.corrector import Corrector
    from slime_core.learning.loss import LossBase
    from slime_core.protocols import DataSource
    from slime_core.rollout.batch import ConvertSamples, RewardPostProcess

logger = logging.getLogger(__name__)

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


def _need_bundle(args: Args) -> None:
    """Raise PluginNotFoundError if the run needs several components of the bundle and it is not installed."""
    if installed(BUNDLE) is not None:
        return
    lacking = []
    for setting, kind in _OF_THE_BUNDLE.items():
        name = getattr(args, setting) or DEFAULTS.get(setting, "")
        known = name in current_registry().names(kind) or name.startswith(kind_of(kind).prefixes)
        lacking += [f"{kind}/{name}"] if name.isidentifier() and not known else []
    if len(lacking) > 1:
        shown = ", ".join(lacking)
        raise PluginNotFoundError(f"the run needs plugins that are not installed: {shown}; pip install {BUNDLE}")


class Resolver:
    """Resolve the specs of one run, and record the components used and the origin of each spec."""

    def __init__(self, settings: Settings) -> None:
        self.args = settings.args
        self._settings = settings
        self.command = settings.command
        self.used: list[Resolved] = []
        self._workers: Workers | None = None

    def setting(self, kind: str, name: str) -> Any:
        """Return the object that setting `name` (or its default) selects, or None if it selects nothing."""
        spec = self.named(name)
        return None if spec is None else self.spec(kind, spec, self.origin(name)).obj

    def function(self, kind: str, name: str) -> Any:
        """Return the plain function that setting `name` selects; its later errors name the setting."""
        found = self.setting(kind, name)
        lasting = kind in ("rollouts", "recipes")
        return None if found is None else guarded(found, f"{self.origin(name)} {self.named(name)!r}", lasting=lasting)

    def each(self, kind: str, name: str, dataset: EvalDataset | None = None) -> list[tuple[Any, str]]:
        """Return (object, label for errors) of every component that setting `name` of the run or data set names.

        The specs are in order, and their paths are made absolute.
        """
        holder = dataset or self.args
        given = getattr(holder, name) or []
        specs = [absolute_spec(spec) for spec in ([given] if isinstance(given, str) else given)]
        if given:
            setattr(holder, name, specs[0] if isinstance(given, str) else specs)
        origin = self.origin(name) if dataset is None else f"evaluation data set {dataset.name!r}: {name}"
        return [(self.spec(kind, spec, origin).obj, f"{origin} {spec!r}") for spec in specs]

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

    def workers(self) -> Workers:
        """Return the worker processes of plain rewards; the first call starts them. Raises PluginNotFoundError."""
        if self._workers is None:
            size = min(4, os.cpu_count() or 1) if self.args.rm_workers is None else self.args.rm_workers
            make: Callable[..., Workers] = provided("slime.api", "reward_processes")
            self._workers = make(self.args, size, memory_limit=self.args.rm_memory_limit)
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

    def provenance(self) -> list[dict[str, object]]:
        """Return name, distribution, version and source hash of every component in use, without duplicates."""
        facts = {(p["kind"], p["name"]): p for p in (found.ref.provenance() for found in self.used)}
        return [facts[key] for key in sorted(facts)]


CORRECTION, REDUCER = "custom_tis_function_path", "custom_pg_loss_reducer_function_path"
FUNCTION = "custom_loss_function_path"
_DEFAULT_CORRECTION = "tis"


@dataclass
class Components:
    """The classes and functions of a run, not yet constructed."""

    data_source: Any = None
    rollout_function: Any = None
    eval_function: Any = None
    generator: GenerateCaller | None = None
    reward: RewardCaller | None = None
    dynamic_filter: Callable[..., object] | None = None
    dynamic_filter_name: str = ""
    estimator: Any = None
    advantage_function: AdvantageFn | None = None
    """Function of `--custom-advantage-function-path`, on top of the estimator."""
    loss: Any = None
    loss_keywords: dict[str, object] = field(default_factory=dict)
    """Keywords of the loss's constructor: `corrector`, `reducer` and `function`, those that the run has."""
    engine: Any = None
    trainer: Any = None
    weight_transport: Any = None
    """The transport that the settings name; None: the engine's best transport, which is known once it has started."""
    post_process_rewards: RewardPostProcess | None = None
    convert_samples: ConvertSamples | None = None
    hooks: Hooks = field(default_factory=nobody)
    """Hooks of installed plugins, and the functions that settings name for hooks."""
    user: RolloutHooks = field(default_factory=RolloutHooks)
    """Hooks that a rollout calls."""
    needs_address: bool = False
    """True if a generate or rollout function takes no `context`, so it may post to the engine's HTTP address."""

    def build_estimator(self, args: Args) -> EstimatorBase | None:
        """Build the estimator; None for a loss without advantages."""
        if self.estimator is None:
            return None
        estimator: type[EstimatorBase] = self.estimator
        if self.advantage_function is not None:
            from slime_core.estimator import with_advantages

            source = f"--custom-advantage-function-path {args.custom_advantage_function_path}"
            estimator = with_advantages(estimator, self.advantage_function, source)
        return estimator(args)

    @property
    def needs_critic(self) -> bool:
        """True if the estimator computes advantages from values."""
        return self.estimator is not None and self.estimator.needs_values

    def build_trainers(self, args: Args) -> Trainers:
        """Build the actor's trainer, and the critic's if the run needs a critic."""
        needed = self.needs_critic and args.compute_advantages_and_returns
        return Trainers(args, self.trainer, with_critic=needed, hooks=self.hooks)

    def build_loss(self, args: Args, estimator: EstimatorBase | None) -> Any:
        """Build the run's loss."""
        loss = self.loss(args, estimator, **self.loss_keywords)
        if loss.needs_advantages is None:
            loss.needs_advantages = args.compute_advantages_and_returns
        return loss

    def build_data_source(self, args: Args) -> DataSource:
        """Build the run's data source. Raises DataError, and PluginError for errors of a user's own."""
        with user_code("--data-source-path"):
            made: DataSource = self.data_source(args)
            return made


def resolve_components(
    settings: Settings, manager: pluggy.PluginManager | None = None, *, learn: bool = True
) -> tuple[Components, Resolver]:
    """Resolve every component that the settings name; `learn=False` leaves out the training side.

    `manager` holds the installed hook plugins; the functions that settings name for hooks are registered with it.

    Raises:
        PluginError: A component cannot be found, loaded or called.
        ConfigError: No reward function is set and the rollout needs one.
    """
    r = Resolver(settings)
    _need_bundle(r.args)
    parts = Components(data_source=_data_source(r))
    parts.rollout_function = r.function("rollouts", "rollout_function_path")
    parts.eval_function = r.function("rollouts", "eval_function_path") or parts.rollout_function
    parts.hooks = r.hooks(bare_manager() if manager is None else manager, learn=learn)
    parts.user = RolloutHooks.of(parts.hooks)
    _warn_of_unasked(r, parts.rollout_function)
    if r.args.load_debug_rollout_data:
        saved = provided("slime.data", "saved")
        parts.data_source, parts.rollout_function, parts.eval_function = saved.UnusedSource, saved.SavedRollout(), None
        parts.user = RolloutHooks(told=parts.hooks, generates=False)
    r.setting("buffers", "buffer_filter_path")  # checked here; the data source resolves it again in its own process
    parts.post_process_rewards = r.function("reward_post_processes", "custom_reward_post_process_path")
    parts.convert_samples = r.function("sample_converters", "custom_convert_samples_to_train_data_path")
    generators: list[GenerateCaller] = []
    if traits_of(parts.rollout_function, RolloutTraits).needs_engine:
        if r.args.debug_train_only:
            raise ConfigError(
                f"{settings.cite('debug_train_only')} starts no engine, and {settings.cite('rollout_function_path')}"
                " may need one: load saved samples (--load-debug-rollout-data FILE), or say so on the function:"
                " @declares(RolloutTraits(needs_engine=False))"
            )
        generators = _resolve_generation(parts, r)
    parts.weight_transport = named_transport(r)
    if learn:
        parts.trainer = r.setting("trainers", "train_backend")
        parts.loss, parts.loss_keywords = _loss(settings, r)
        if parts.loss.needs_advantages is not False:
            parts.estimator = _estimator(r)
            parts.advantage_function = r.function("advantages", "custom_advantage_function_path")
    elif settings.command != "eval" and settings.is_given("advantage_estimator"):
        # This run does not train, but later training on its samples may need the estimator's greedy baseline.
        parts.estimator = _estimator(r)
    check_components(settings, parts, generators)
    return parts, r


def named_transport(r: Resolver) -> Any:
    """Return the transport that `--update-weight-transport` names, or None if its value leaves the engine to choose."""
    name = "update_weight_transport"
    if r.args.update_weight_transport in NO_NAMES:
        return None
    transport = r.setting("weight_transports", name)
    transport_traits(transport, r.origin(name))
    return transport


def _data_source(r: Resolver) -> Callable[[Args], DataSource]:
    """Return the constructor of the run's data source."""
    found, name = r.setting("data_sources", "data_source_path"), option_name(r.used[-1].ref)
    return functools.partial(construct, found, name=name) if inspect.isclass(found) else found


def _estimator(r: Resolver) -> type[EstimatorBase]:
    from slime_core.estimator import estimator_class

    return estimator_class(r.setting("estimators", "advantage_estimator"), str(r.args.advantage_estimator))


def _warn_of_unasked(r: Resolver, rollout_function: Callable[..., object]) -> None:
    """Warn if the chosen rollout function does not call the sample hooks that the settings name."""
    name = "rollout_sample_hook_path"
    if r.args.rollout_sample_hook_path and "context" not in inspect.signature(rollout_function).parameters:
        logger.warning(
            "%s: without effect, since %s generates by itself, unless it calls them as slime-compat's generate_and_rm"
            " does; a rollout function that declares the keyword `context` has them called by context.runner.run_group",
            r.origin(name), name_of(rollout_function),
        )  # fmt: skip


def _resolve_generation(parts: Components, r: Resolver) -> list[GenerateCaller]:
    """Resolve all components between prompt and reward; return the generate functions that settings name."""
    args = r.args
    name = "custom_generate_function_path"
    parts.generator = r.generator(r.named(name) or DEFAULTS[name], r.origin(name))
    parts.generator.check(args, training=r.command != "eval")
    generators = [parts.generator]
    r.setting("environments", "environment_path")  # checked here; a sample's generator resolves it again
    reward_flag = "custom_rm_path" if args.custom_rm_path else "rm_type"
    spec = r.named(reward_flag)
    if spec:
        parts.reward = r.reward(spec, r.origin(reward_flag))
    filter_spec = args.dynamic_sampling_filter_path
    if filter_spec:
        parts.dynamic_filter = r.setting("filters", "dynamic_sampling_filter_path")
        parts.dynamic_filter_name = filter_spec
    for dataset in args.eval_datasets or []:
        reward = dataset.custom_rm_path or dataset.rm_type
        if reward and reward != spec:
            r.reward(reward, f"evaluation data set {dataset.name!r}")
        generators.append(_resolve_dataset(dataset, parts.generator, r))
    rollouts = (parts.rollout_function, parts.eval_function)
    parts.needs_address = not (
        all(g.takes_context for g in generators) and all("context" in inspect.signature(f).parameters for f in rollouts)
    )
    if args.environment_path and not any(g.traits.uses_environment for g in generators):
        logger.warning(
            "%s has no effect with generator %s, unless a row chooses another; type --custom-generate-function-path"
            " multi_turn (or declare the trait uses_environment=True)", r.origin("environment_path"),
            parts.generator.label,
        )  # fmt: skip
    parts.engine = r.setting("engines", "rollout_engine")
    r.each("tools", "tools_path")
    if args.tool_call_parser != AUTO:
        r.setting("tool_parsers", "tool_call_parser")
    run_tools(args)
    return generators


def _resolve_dataset(dataset: EvalDataset, generator: GenerateCaller, r: Resolver) -> GenerateCaller:
    """Resolve all components that the data set's entry names; return its generate function."""
    origin = f"evaluation data set {dataset.name!r}"
    if dataset.custom_generate_function_path:
        dataset.custom_generate_function_path = absolute_spec(dataset.custom_generate_function_path)
        generator = r.generator(dataset.custom_generate_function_path, origin)
    if r.each("environments", "environment_path", dataset) and not generator.traits.uses_environment:
        logger.warning(
            "%s: environment_path %r has no effect with generator %s, unless a row chooses another; add"
            " custom_generate_function_path: multi_turn", origin, dataset.environment_path, generator.label,
        )  # fmt: skip
    r.each("tools", "tools_path", dataset)
    if dataset.answer_path:
        dataset.answer_path = absolute_spec(dataset.answer_path)
        provided("slime.data", "answers").named_extractor(dataset.answer_path, f"{origin}: answer_path")
    own = dataset_args(r.args, dataset)
    run_tools(own)
    generator.check(own, training=False)
    return generator


def _loss(settings: Settings, r: Resolver) -> tuple[type[LossBase], dict[str, object]]:
    """Resolve `--loss-type` and the keywords that act on its policy term: off-policy correction, reducer, function.

    Raises:
        ConfigError: A setting that the chosen loss or correction does not read, or that contradicts another.
        PluginError: A component cannot be found, loaded or called.
    """
    from slime_core.learning.loss import LossBase

    loss, chosen = with_defaults(r.setting("losses", "loss_type"), LossBase), f"--loss-type {r.args.loss_type!r}"
    if loss.needs_advantages and not r.args.compute_advantages_and_returns:
        raise ConfigError(
            f"{settings.cite('compute_advantages_and_returns')}: {chosen} needs advantages; remove it, or choose a loss"
            " without them, such as sft_loss"
        )
    found = {
        "corrector": _corrector(settings, r), "reducer": _reducer(r), "function": r.function("custom_losses", FUNCTION)
    }  # fmt: skip
    if loss.needs_function and found["function"] is None:
        raise ConfigError(f"{settings.cite('loss_type')} needs --{FUNCTION.replace('_', '-')} PATH")
    keywords = {name: value for name, value in found.items() if value is not None}
    asked_by = {"corrector": ("use_tis", "get_mismatch_metrics"), "reducer": (REDUCER,), "function": (FUNCTION,)}
    for name in keywords.keys() - declared(loss, keywords):
        flag = next(f for f in asked_by[name] if getattr(r.args, f))
        works = "custom_loss" if name == "function" else "policy_loss"
        raise ConfigError(f"{settings.cite(flag)}: {chosen} does not take a {name}; it works with {works}")
    for flag in ("use_opsm", "proximal_policy"):
        if settings.is_given(flag) and not declared(loss, ("corrector",)):
            raise ConfigError(f"{settings.cite(flag)}: {chosen} does not read it; it works with policy_loss")
    warn_without_effect(settings, loss.ignores, chosen)
    return loss, keywords


def _corrector(settings: Settings, r: Resolver) -> Corrector | None:
    args = settings.args
    if not (args.use_tis or args.get_mismatch_metrics):
        return None
    from slime_core.learning.corrector import SETTINGS, Corrector

    spec = r.named(CORRECTION) or (_DEFAULT_CORRECTION if args.use_tis else None)
    component: Any = None
    if spec is not None:
        origin = r.origin(CORRECTION) if getattr(args, CORRECTION) else settings.cite("use_tis")
        found = r.spec("corrections", spec, origin).obj
        component = construct(found, args) if inspect.isclass(found) else found
        if hasattr(component, "weigh"):
            _check_component(settings, component, spec, [name for name in SETTINGS if settings.is_given(name)])
            component.weigh = guarded(component.weigh, f"{origin} {spec!r}")
        else:
            component = guarded(component, f"{origin} {spec!r}")
    return Corrector(args, component, applies=args.use_tis, reports_mismatch=args.get_mismatch_metrics)


def _check_component(settings: Settings, component: object, spec: str, given: list[str]) -> None:
    unread = [settings.cite(name) for name in given if name not in getattr(component, "reads", given)]
    if unread:
        raise ConfigError(
            f"correction {spec!r} does not read {', '.join(unread)}; choose one that does"
            " (--custom-tis-function-path mis), or remove"
        )
    if settings.args.proximal_policy == "interpolate" and getattr(component, "whole_step", False):
        raise ConfigError(
            f"{settings.cite('proximal_policy')}: correction {spec!r} normalises over the whole optimizer step, but"
            " interpolated log-probs are known only micro-batch by micro-batch; remove one"
        )


def _reducer(r: Resolver) -> Callable[..., object] | None:
    """Return the reducer's maker. Call it with one token first, so that its errors end the command now."""
    found = r.function("loss_reducers", REDUCER)
    if found is None:
        return None
    make = functools.partial(found, args=r.args) if "args" in declared(found, ("args",)) else found
    import torch

    from slime_core.learning.loss import reduced

    one = torch.ones(1)
    reduced(make, r.args, one, one, [2], [1])
    return make
