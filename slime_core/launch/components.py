"""Settings -> the components they name, all resolved and signature-checked before anything is started.

Every launcher calls `resolve_components` first: an unknown name, a typo in a path or a wrong signature ends the
command here, with one line that says which setting it came from.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime_core.config import Settings
from slime_core.errors import ConfigError
from slime_core.plugins.adapters import GenerateCaller, RewardCaller
from slime_core.plugins.boundary import guarded
from slime_core.plugins.resolve import Resolved, absolute_spec, resolve

logger = logging.getLogger(__name__)

DEFAULTS = {
    "data_source_path": "dataset",
    "rollout_function_path": "generate",
    "custom_generate_function_path": "single_turn",
    "buffer_filter_path": "fifo",
}
"""Component names that stand for a setting that was not given."""


@dataclass
class Components:
    """Classes and functions, not yet constructed."""

    data_source: Any = None
    rollout_function: Any = None
    eval_function: Any = None
    generator: GenerateCaller | None = None
    reward: RewardCaller | None = None
    dynamic_filter: Any = None
    dynamic_filter_name: str = ""
    estimator: Any = None
    advantage_function: Any = None
    """`--custom-advantage-function-path`, on top of the estimator."""
    loss: Any = None
    engine: Any = None
    trainer: Any = None
    post_process_rewards: Callable[..., Any] | None = None
    convert_samples: Callable[..., Any] | None = None
    needs_address: bool = False
    """A generate or rollout function takes no `context`, so it may post to the engine's HTTP address."""
    resolved: list[Resolved] = field(default_factory=list)

    def build_estimator(self, args: Any) -> Any:
        """The estimator, wrapped where a function computes the advantages; None for a loss without advantages."""
        from slime_core.estimator import CustomAdvantages, EstimatorBase

        if self.estimator is None:
            return None
        made: Any = self.estimator
        if not inspect.isclass(made):
            return CustomAdvantages(EstimatorBase(args), made, str(args.advantage_estimator))
        build: Callable[[Any], Any] = made
        estimator = build(args)
        if self.advantage_function is None:
            return estimator
        return CustomAdvantages(estimator, self.advantage_function, str(args.custom_advantage_function_path))

    def provenance(self) -> list[dict[str, Any]]:
        """Name, distribution, version and source hash of every plugin in use, once each."""
        facts = {(p["kind"], p["name"]): p for p in (r.provenance() for r in self.resolved)}
        return [facts[key] for key in sorted(facts)]


class Resolver:
    """Resolves specs of one run, remembering what was used and where each spec came from."""

    def __init__(self, settings: Settings) -> None:
        self.args = settings.args
        self._settings = settings
        self.used: list[Resolved] = []

    def setting(self, kind: str, name: str) -> Any:
        """The object that setting `name` (or its default) selects; None when it selects nothing."""
        spec = self.named(name)
        return None if spec is None else self.spec(kind, spec, self.origin(name)).obj

    def function(self, kind: str, name: str) -> Any:
        """As `setting`, for a plain function: what it raises later names the setting."""
        found = self.setting(kind, name)
        return None if found is None else guarded(found, f"{self.origin(name)} {self.named(name)!r}")

    def named(self, name: str) -> str | None:
        """The spec that setting `name` holds, its file path made absolute for other processes; or the default's."""
        if getattr(self.args, name, None):
            setattr(self.args, name, absolute_spec(getattr(self.args, name)))
        return getattr(self.args, name, None) or DEFAULTS.get(name)

    def origin(self, name: str) -> str:
        """`--flag (where it was set)`, for error messages."""
        return f"--{name.replace('_', '-')} ({self._settings.origins[name]})"

    def spec(self, kind: str, spec: str, origin: str) -> Resolved:
        """Resolve and remember."""
        resolved = resolve(kind, spec, origin=origin)
        self.used.append(resolved)
        return resolved

    def reward(self, spec: str, origin: str = "sample.custom_rm_path") -> RewardCaller:
        """A reward function ready to be called."""
        return RewardCaller(self.spec("rewards", spec, origin), self.args, group=self.args.group_rm)

    def generator(self, spec: str, origin: str = "sample.generate_function_path") -> GenerateCaller:
        """A generate function ready to be called."""
        return GenerateCaller(self.spec("generators", spec, origin))


def resolve_components(settings: Settings, *, learn: bool = True) -> tuple[Components, Resolver]:
    """Resolve everything the run names; `learn=False` leaves out the training side.

    Raises:
        PluginError: Something cannot be found, loaded or called.
        ConfigError: No reward function is set and the rollout needs one.
    """
    r = Resolver(settings)
    parts = Components(data_source=r.setting("data_sources", "data_source_path"))
    parts.rollout_function = r.function("rollouts", "rollout_function_path")
    parts.eval_function = r.function("rollouts", "eval_function_path") or parts.rollout_function
    r.setting("buffers", "buffer_filter_path")  # checked here; the data source resolves it again where it lives
    parts.post_process_rewards = r.function("reward_post_processes", "custom_reward_post_process_path")
    parts.convert_samples = r.function("sample_converters", "custom_convert_samples_to_train_data_path")
    if getattr(parts.rollout_function, "needs_engine", True):
        _resolve_generation(parts, r)
    if learn:
        parts.trainer = r.setting("trainers", "train_backend")
        parts.loss = r.setting("losses", "loss_type")
        if getattr(parts.loss, "needs_advantages", True):
            parts.estimator = r.setting("estimators", "advantage_estimator")
            parts.advantage_function = r.function("advantages", "custom_advantage_function_path")
            _check_requirements(settings, parts.estimator)
    parts.resolved = r.used
    return parts, r


def _resolve_generation(parts: Components, r: Resolver) -> None:
    args = r.args
    name = "custom_generate_function_path"
    parts.generator = r.generator(r.named(name) or DEFAULTS[name], r.origin(name))
    generators = [parts.generator]
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
        if dataset.custom_generate_function_path:
            generators.append(
                r.generator(dataset.custom_generate_function_path, f"evaluation data set {dataset.name!r}")
            )
    rollouts = (parts.rollout_function, parts.eval_function)
    parts.needs_address = not (
        all(g.takes_context for g in generators) and all("context" in inspect.signature(f).parameters for f in rollouts)
    )
    parts.engine = r.setting("engines", "rollout_engine")


def _check_requirements(settings: Settings, estimator: Any) -> None:
    """Settings that the algorithm cannot do without, and those it leaves without effect."""
    from slime_core.estimator import EstimatorBase

    args = settings.args
    chosen = f"--advantage-estimator {args.advantage_estimator!r}"
    if args.kl_coef and getattr(estimator, "advantages", None) is EstimatorBase.advantages:  # which reads no KL
        logger.warning(
            "%s only adds the metric rollout/kl with %s; use --use-kl-loss", settings.cite("kl_coef"), chosen
        )
    if args.n_samples_per_prompt == 1 and args.rewards_normalization and getattr(estimator, "compares_group", False):
        logger.warning("%s: every advantage of %s is zero", settings.cite("n_samples_per_prompt"), chosen)
    if getattr(estimator, "needs_values", False):
        raise ConfigError(f"{chosen} needs values of a critic, and no trainer here has one; choose another estimator")
    for name, value in getattr(estimator, "requires", {}).items():
        if getattr(args, name) != value:
            raise ConfigError(
                f"{chosen} needs {name} = {value!r}, but it is"
                f" {getattr(args, name)!r} ({settings.origins[name]}); type --{name.replace('_', '-')}"
                f"{'' if value is True else f' {value}'}"
            )
