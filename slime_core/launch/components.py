"""Resolve and signature-check all components that the settings name, before anything is started.

Every launcher calls `resolve_components` first. An unknown name, a typo in a path or a wrong signature ends the
command here, with one line that names the setting.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pluggy

from slime_core.config import Settings
from slime_core.config.spec import flag_specs
from slime_core.data.dumps import SavedRollout, UnusedSource
from slime_core.data.tools import AUTO, run_tools
from slime_core.errors import ConfigError, PluginError, name_of
from slime_core.launch.objective import Objective, resolve_objective, warn_without_effect
from slime_core.launch.resolver import DEFAULTS, Resolver
from slime_core.launch.trainers import Trainers
from slime_core.plugins.adapters import GenerateCaller, RewardCaller
from slime_core.plugins.hooks import Hooks, bare_manager, nobody
from slime_core.plugins.options import option_name
from slime_core.plugins.resolve import absolute_spec
from slime_core.plugins.signatures import construct, declared
from slime_core.protocols import Args, EngineTraits, RolloutTraits, TrainerTraits, traits_of
from slime_core.rollout.evaluate import dataset_args
from slime_core.rollout.hooks import RolloutHooks
from slime_core.weights.sync import NO_NAMES
from slime_core.weights.transports import transport_traits

logger = logging.getLogger(__name__)


@dataclass
class Components:
    """The classes and functions of a run, not yet constructed."""

    data_source: Any = None
    rollout_function: Any = None
    eval_function: Any = None
    generator: GenerateCaller | None = None
    reward: RewardCaller | None = None
    dynamic_filter: Any = None
    dynamic_filter_name: str = ""
    estimator: Any = None
    advantage_function: Any = None
    """Function of `--custom-advantage-function-path`, on top of the estimator."""
    loss: Any = None
    objective: Objective | None = None
    """The loss and its constructor inputs."""
    engine: Any = None
    trainer: Any = None
    weight_transport: Any = None
    """The transport that the settings name; None: the engine's best transport, which is known once it has started."""
    post_process_rewards: Callable[..., Any] | None = None
    convert_samples: Callable[..., Any] | None = None
    hooks: Hooks = field(default_factory=nobody)
    """Hooks of installed plugins, and the functions that settings name for hooks."""
    user: RolloutHooks = field(default_factory=RolloutHooks)
    """Hooks that a rollout calls."""
    needs_address: bool = False
    """True if a generate or rollout function takes no `context`, so it may post to the engine's HTTP address."""

    def build_estimator(self, args: Args) -> Any:
        """Build the estimator, wrapped if a function computes the advantages; None for a loss without advantages."""
        if self.estimator is None:
            return None
        estimator = self.estimator(args)
        if self.advantage_function is None:
            return estimator
        from slime_core.estimator import CustomAdvantages

        return CustomAdvantages(estimator, self.advantage_function, str(args.custom_advantage_function_path))

    @property
    def needs_critic(self) -> bool:
        """True if the estimator computes advantages from values."""
        return self.estimator is not None and self.estimator.needs_values

    def build_trainers(self, args: Args) -> Trainers:
        """Build the actor's trainer, and the critic's if the run needs a critic."""
        needed = self.needs_critic and args.compute_advantages_and_returns
        return Trainers(args, self.trainer, with_critic=needed, hooks=self.hooks)

    def build_loss(self, args: Args, estimator: Any) -> Any:
        """Build the run's loss."""
        assert self.objective is not None, "resolved without the training side"
        return self.objective.build(args, estimator)


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
    r.need_bundle()
    parts = Components(data_source=_data_source(r))
    parts.rollout_function = r.function("rollouts", "rollout_function_path")
    parts.eval_function = r.function("rollouts", "eval_function_path") or parts.rollout_function
    parts.hooks = r.hooks(bare_manager() if manager is None else manager, learn=learn)
    parts.user = RolloutHooks.of(parts.hooks)
    _warn_of_unasked(r, parts.rollout_function)
    if r.args.load_debug_rollout_data:
        parts.data_source, parts.rollout_function, parts.eval_function = UnusedSource, SavedRollout(), None
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
        parts.objective = resolve_objective(settings, r)
        parts.loss = parts.objective.loss
        if parts.loss.needs_advantages is not False:
            parts.estimator = _estimator(r)
            parts.advantage_function = r.function("advantages", "custom_advantage_function_path")
            _check_requirements(settings, parts.estimator)
            _warn_of_unread(settings, parts)
            _check_roles(settings, parts)
        if r.args.use_opd and not parts.objective.needs_advantages(r.args):
            raise ConfigError(
                f"{settings.cite('use_opd')}: --loss-type {r.args.loss_type!r} uses no advantages, which distillation"
                " changes; it works with policy_loss"
            )
        _check_pairs(settings, parts)
    elif settings.command != "eval" and settings.is_given("advantage_estimator"):
        # This run does not train, but later training on its samples may need the estimator's greedy baseline.
        parts.estimator = _estimator(r)
    if settings.args.multimodal_keys or any(dataset.multimodal_keys for dataset in settings.args.eval_datasets):
        from slime_core.launch.images import check_images

        check_images(settings, parts, generators)
    return parts, r


def named_transport(r: Resolver) -> Any:
    """Return the transport that `--update-weight-transport` names, or None if its value leaves the engine to choose."""
    name = "update_weight_transport"
    if r.args.update_weight_transport in NO_NAMES:
        return None
    transport = r.setting("weight_transports", name)
    transport_traits(transport, r.origin(name))
    return transport


def _data_source(r: Resolver) -> Callable[[Any], Any]:
    """Return the constructor of the run's data source."""
    found, name = r.setting("data_sources", "data_source_path"), option_name(r.used[-1].ref)
    if r.args.data_source_path is not None:
        from slime_core.data.flat_source import FlatSource, is_flat

        if is_flat(found):
            return functools.partial(FlatSource, cls=found, name=name)
    return functools.partial(construct, found, name=name) if inspect.isclass(found) else found


def _estimator(r: Resolver) -> Any:
    from slime_core.estimator import estimator_class

    return estimator_class(r.setting("estimators", "advantage_estimator"), str(r.args.advantage_estimator))


def _warn_of_unasked(r: Resolver, rollout_function: Any) -> None:
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


def _resolve_dataset(dataset: Any, generator: GenerateCaller, r: Resolver) -> GenerateCaller:
    """Resolve all components that the data set's entry names; return its generate function."""
    origin = f"evaluation data set {dataset.name!r}"
    if dataset.custom_generate_function_path:
        dataset.custom_generate_function_path = absolute_spec(dataset.custom_generate_function_path)
        generator = r.generator(dataset.custom_generate_function_path, origin)
    if dataset.environment_path:
        dataset.environment_path = absolute_spec(dataset.environment_path)
        r.spec("environments", dataset.environment_path, f"{origin}: environment_path")
        if not generator.traits.uses_environment:
            logger.warning(
                "%s: environment_path %r has no effect with generator %s, unless a row chooses another; add"
                " custom_generate_function_path: multi_turn", origin, dataset.environment_path, generator.label,
            )  # fmt: skip
    if dataset.tools_path is not None:
        dataset.tools_path = [absolute_spec(spec) for spec in dataset.tools_path]
        for spec in dataset.tools_path:
            r.spec("tools", spec, f"{origin}: tools_path")
    if dataset.answer_path:
        dataset.answer_path = absolute_spec(dataset.answer_path)
        from slime_core.plugins.answers import named_extractor

        named_extractor(dataset.answer_path, f"{origin}: answer_path")
    own = dataset_args(r.args, dataset)
    run_tools(own)
    generator.check(own, training=False)
    return generator


_PAIRS = (
    ("true_on_policy_mode", "true_on_policy", "true_on_policy", "does not compute the same bits in every batch"),
    (
        "use_sampling_mask",
        "returns_sampling_mask",
        "sampling_mask",
        "does not tell or use what tokens are sampled among",
    ),
)
"""(setting, engine trait, trainer trait, error text): settings that need a trait of the engine and of the trainer."""


def _check_pairs(settings: Settings, parts: Components) -> None:
    """Raise ConfigError if a setting of `_PAIRS` lacks its traits, or a loss on the trainer's own log-probs."""
    for setting, of_engine, of_trainer, wrong in _PAIRS:
        if not getattr(settings.args, setting):
            continue
        if parts.loss.needs_logits or parts.loss.needs_advantages is False:
            raise ConfigError(
                f"{settings.cite(setting)}: --loss-type {settings.args.loss_type!r} is not computed from the log-probs"
                " that are compared with the engine's; it works with policy_loss"
            )
        for name, part, traits, trait in (
            ("rollout_engine", parts.engine, traits_of(parts.engine, EngineTraits), of_engine),
            ("train_backend", parts.trainer, traits_of(parts.trainer, TrainerTraits), of_trainer),
        ):
            if part is not None and not getattr(traits, trait):
                raise ConfigError(
                    f"{settings.cite(setting)}: {settings.cite(name)} {wrong} (its traits do not say `{trait}`); choose"
                    f" another --{name.replace('_', '-')}"
                )


_OTHER_SIGNALS = (
    "rollout_function_path custom_advantage_function_path custom_reward_post_process_path use_opd loss_type"
    " load_debug_rollout_data custom_convert_samples_to_train_data_path"
)
"""Settings that can give a training signal when a prompt has only one answer."""


def _check_requirements(settings: Settings, estimator: Any) -> None:
    """Raise ConfigError if the algorithm lacks a required setting, or a group of answers to compare."""
    args = settings.args
    chosen = f"--advantage-estimator {args.advantage_estimator!r}"
    if args.n_samples_per_prompt == 1 and args.rewards_normalization and estimator.compares_group:
        zero = f"{settings.cite('n_samples_per_prompt')}: every advantage of {chosen} is zero, since it compares the"
        zero += " answers to one prompt; type --n-samples-per-prompt 8"
        if not any(map(settings.is_given, _OTHER_SIGNALS.split())):
            raise ConfigError(zero)
        logger.warning("%s", zero)
    for name, value in estimator.requires.items():
        if name not in settings.origins:
            raise PluginError(f"{chosen} requires {name!r}, which is no setting")
        if getattr(args, name) != value:
            raise ConfigError(
                f"{chosen} needs {name} = {value!r}, but it is"
                f" {getattr(args, name)!r} ({settings.origins[name]}); type {flag_specs()[name].show(value)}"
            )


def _warn_of_unread(settings: Settings, parts: Components) -> None:
    """Warn of settings that the estimator `ignores`, and of settings whose readers it does not override."""
    from slime_core.estimator import EstimatorBase

    estimator, chosen = parts.estimator, f"--advantage-estimator {settings.args.advantage_estimator!r}"
    unread = set(estimator.ignores)
    if estimator.shape_rewards is EstimatorBase.shape_rewards:
        unread |= {"rewards_normalization", "grpo_std_normalization"}
    reads_rewards_only = estimator.advantages is EstimatorBase.advantages
    if reads_rewards_only:
        unread |= {"gamma", "lambd"}
    if parts.advantage_function is not None:  # it may read any setting
        unread -= {"gamma", "lambd"}
    elif settings.args.kl_coef and reads_rewards_only:
        logger.warning(
            "%s only adds the metric rollout/kl with %s; the loss takes --use-kl-loss --kl-loss-coef",
            settings.cite("kl_coef"), chosen,
        )  # fmt: skip
    warn_without_effect(settings, unread, chosen)


def _check_roles(settings: Settings, parts: Components) -> None:
    """Check that the algorithm has the teacher or critic it needs; warn of critic settings without a critic."""
    args = settings.args
    chosen = f"--advantage-estimator {args.advantage_estimator!r}"
    if parts.estimator.needs_teacher and not args.use_opd:
        raise ConfigError(f"{chosen} needs a teacher; type --use-opd --opd-type local --opd-teacher-load DIR")
    if parts.needs_critic:
        if "role" not in declared(parts.trainer, ("role",)):
            raise ConfigError(
                f"{chosen} needs a critic, and --train-backend {args.train_backend!r} has none (its class takes no"
                " keyword 'role'); choose another estimator or trainer"
            )
        return
    given = [settings.cite(name) for name in ("critic_lr", "critic_load", "value_clip") if settings.is_given(name)]
    if args.megatron_config_path:
        from slime_core.config.role_settings import role_overrides

        if "critic" in role_overrides(args):
            given.append(f"the entry for critic of --megatron-config-path {args.megatron_config_path!r}")
    if given:
        shown = ", ".join(given)
        logger.warning("without effect, since %s has no critic: %s", chosen, shown)
    if args.num_critic_only_steps:
        raise ConfigError(
            f"{settings.cite('num_critic_only_steps')}: {chosen} has no critic to train; type --advantage-estimator ppo"
        )
