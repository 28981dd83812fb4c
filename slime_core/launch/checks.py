"""Check the settings against the run's components, once, before anything starts.

`components.resolve_components` calls `check_components`; `prepare` calls `check_component_settings` and
`settle_offload`, once the plugins have seen the settings, and `check_routed_model`, once the model is there. A
component declares in its traits what it can do, and of the settings in `config.support.BY_COMPONENT` those that it
`uses`. Its class may have two classmethods: `missing(args)` returns the packages that are not installed and the command
that installs them (empty if nothing is missing), and `check_settings(settings)` returns warnings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slime_core.config import Settings
from slime_core.config.load import WITHOUT_FLAGS
from slime_core.config.spec import flag_specs
from slime_core.config.support import OF_TRAINERS, check_component_support
from slime_core.data.rows import check_kinds
from slime_core.errors import ConfigError, PluginError
from slime_core.launch.launchers import launcher_traits
from slime_core.models.config import read_hf_config
from slime_core.plugins.adapters import GenerateCaller
from slime_core.plugins.signatures import declared
from slime_core.protocols import EngineTraits, TrainerTraits, TransportTraits, traits_of

if TYPE_CHECKING:
    from slime_core.estimator import EstimatorBase
    from slime_core.launch.components import Components
    from slime_core.learning.loss import LossBase

logger = logging.getLogger(__name__)

_OF_ENGINE_ACTORS = frozenset({"rollout_max_engine_restarts", "use_fault_tolerance"})
"""Settings that a launcher applies to an engine process that it started (`LauncherTraits.restarts_engines`)."""

_ADAPTERS = "does not choose among adapters by sample"
_BITS, _MASK = "does not compute the same bits in every batch", "does not tell or use what tokens are sampled among"
_NEEDS = (
    ("true_on_policy_mode", "rollout_engine", "true_on_policy", _BITS, ""),
    ("true_on_policy_mode", "train_backend", "true_on_policy", _BITS, ""),
    ("use_sampling_mask", "rollout_engine", "returns_sampling_mask", _MASK, ""),
    ("use_sampling_mask", "train_backend", "sampling_mask", _MASK, ""),
    ("use_routing_replay", "train_backend", "routing_replay", "cannot replay routing", ""),
    (
        "use_rollout_routing_replay", "rollout_engine", "returns_routed_experts", "does not say which experts it used",
        "choose another --rollout-engine, or --use-routing-replay alone",
    ),
    (
        "multimodal_keys", "rollout_engine", "takes_images", "generates from text only",
        "type --rollout-engine sglang or --rollout-engine http",
    ),
    ("multimodal_keys", "train_backend", "takes_images", "trains on text only", "type --train-backend embedded"),
    ("lora_adapters", "rollout_engine", "takes_adapters", _ADAPTERS, "type --rollout-engine embedded"),
    ("lora_adapters", "train_backend", "takes_adapters", _ADAPTERS, "type --train-backend embedded"),
    ("lora_unmerged", "rollout_engine", "adds_adapters", "takes merged weights only", "remove --lora-unmerged"),
)  # fmt: skip
"""(setting, setting that names a component, trait that the component needs, error text, what to do)."""
_OF_TRAINING = ("true_on_policy_mode", "use_sampling_mask")
"""Settings of `_NEEDS` that a run without training does not use."""


def check_components(settings: Settings, parts: Components, generators: Sequence[GenerateCaller]) -> None:
    """Log warnings. Raises ConfigError for a setting that a component of the run cannot serve."""
    if parts.trainer is not None:
        if parts.loss.needs_advantages is not False:
            _check_requirements(settings, parts.estimator)
            _warn_of_unread(settings, parts)
            _check_roles(settings, parts)
        _check_loss(settings, parts.loss)
    named = _chosen(parts)
    for setting, cited in _asked(settings, trains=parts.trainer is not None):
        for of, name, trait, wrong, way in _NEEDS:
            if of == setting and name in named and not getattr(named[name].traits, trait):
                raise ConfigError(
                    f"{cited}: {settings.cite(name)} {wrong} (its traits do not say `{trait}`);"
                    f" {way or f'choose another {flag_specs()[name].flag}'}"
                )
        for generator in generators if setting == "multimodal_keys" else ():
            if not generator.traits.takes_images:
                raise ConfigError(
                    f"{cited}: {generator.label} does not give images to the engine; use single_turn, or a function"
                    " with @declares(GenerateTraits(takes_images=True)), which passes image_data=sample.image_data()"
                )


def _check_loss(settings: Settings, loss: type[LossBase]) -> None:
    """Raise ConfigError for a setting that works with the policy loss only."""
    args, none = settings.args, loss.needs_advantages is False
    other, idle = none or loss.needs_logits, none or not (loss.needs_advantages or args.compute_advantages_and_returns)
    text = "is not computed from the log-probs that are compared with the engine's"
    for setting, lacks, why in (
        ("use_opd", idle, "uses no advantages, which distillation changes"),
        ("true_on_policy_mode", other, text),
        ("use_sampling_mask", other, text),
        ("use_routing_replay", none, "has no log-prob pass and no rollout to repeat"),
    ):  # fmt: skip
        if lacks and getattr(args, setting):
            raise ConfigError(
                f"{settings.cite(setting)}: --loss-type {args.loss_type!r} {why}; it works with policy_loss"
            )


def _asked(settings: Settings, *, trains: bool) -> Iterator[tuple[str, str]]:
    """Yield (setting of `_NEEDS`, its name in messages) for each that is set, by an evaluation data set too."""
    args = settings.args
    for name in dict.fromkeys(row[0] for row in _NEEDS):
        if getattr(args, name) and (trains or name not in _OF_TRAINING):
            yield name, settings.cite(name)
    for dataset in args.eval_datasets:
        if dataset.multimodal_keys and dataset.multimodal_keys != args.multimodal_keys:
            yield "multimodal_keys", f"multimodal_keys of evaluation data set {dataset.name!r}"
    for columns in (args.multimodal_keys, *(dataset.multimodal_keys for dataset in args.eval_datasets)):
        check_kinds(columns or {})


_OTHER_SIGNALS = (
    "rollout_function_path custom_advantage_function_path custom_reward_post_process_path use_opd loss_type"
    " load_debug_rollout_data custom_convert_samples_to_train_data_path"
)
"""Settings that can give a training signal when a prompt has only one answer."""


def _check_requirements(settings: Settings, estimator: type[EstimatorBase]) -> None:
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


def warn_without_effect(settings: Settings, unread: Iterable[str], chosen: str) -> None:
    """Warn of given settings that `chosen` does not read. Raises PluginError for a name that is no setting."""
    unknown = sorted(name for name in unread if name not in settings.origins)
    if unknown:
        raise PluginError(f"{chosen} ignores {', '.join(unknown)}, which is no setting")
    given = [settings.cite(name) for name in sorted(unread) if settings.is_given(name)]
    if given:
        logger.warning("without effect with %s, which does not read it: %s", chosen, ", ".join(given))


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
    if "critic" in args.role_settings:
        given.append(f"the entry for critic of --megatron-config-path {args.megatron_config_path!r}")
    if given:
        shown = ", ".join(given)
        logger.warning("without effect, since %s has no critic: %s", chosen, shown)
    if args.num_critic_only_steps:
        raise ConfigError(
            f"{settings.cite('num_critic_only_steps')}: {chosen} has no critic to train; type --advantage-estimator ppo"
        )


def check_component_settings(settings: Settings, parts: Components) -> None:
    """Log warnings. Raises ConfigError for a setting that no component uses or that a component refuses."""
    chosen = _chosen(parts)
    _check_installed(settings, chosen)
    warn_unsupported(settings, parts)
    _settle_weight_files(settings, parts.weight_transport)
    for part in (*(each.part for each in chosen.values()), parts.loss):
        check = getattr(part, "check_settings", None)
        for warning in check(settings) if check is not None else ():
            logger.warning("%s", warning)


def _settle_weight_files(settings: Settings, transport: Any) -> None:
    """Set the directory of a transport that writes files. Raises ConfigError."""
    args = settings.args
    if transport is None or not transport.traits.writes_files or args.update_weight_disk_dir is not None:
        return
    if args.run_dir is None:
        raise ConfigError(
            f"{settings.cite('update_weight_transport')} needs --update-weight-disk-dir DIR or --save DIR."
        )
    settings.derive("update_weight_disk_dir", os.path.join(args.run_dir, "weights"), "run_dir")


def settle_offload(settings: Settings, parts: Components) -> None:
    """Turn off the offload settings whose component is missing or cannot offload; warn about defaulted settings."""
    for name, setting in (("offload_rollout", "rollout_engine"), ("offload_train", "train_backend")):
        chosen = _chosen(parts).get(setting)
        if not getattr(settings.args, name) or (chosen is not None and name in chosen.traits.uses):
            continue
        if chosen is not None and not settings.is_given(name):  # `uses` has been checked if the user gave it
            flag = flag_specs()[name].flag
            logger.warning("%s, from %s: %s keeps its memory", flag, settings.origins[name], settings.cite(setting))
        settings.derive(name, False, setting)


def warn_unsupported(settings: Settings, parts: Components) -> list[str]:
    """Log and return warnings about settings that no component uses. Raises ConfigError."""
    chosen, uses = _chosen(parts), set[str]()
    for name, each in chosen.items():
        uses.update(each.traits.uses)
        for unknown in sorted(uses - flag_specs().keys()):
            raise PluginError(f"{settings.cite(name)}: `uses` of its traits has {unknown!r}, which is no setting")
    if parts.trainer is None:
        uses |= OF_TRAINERS.keys()
    if parts.engine is not None and not traits_of(parts.engine, EngineTraits).runs_elsewhere:
        uses |= _OF_ENGINE_ACTORS if launcher_traits(settings).restarts_engines else set()
    named = " and ".join(f"{flag_specs()[name].flag} {getattr(settings.args, name)}" for name in chosen)
    told = check_component_support(settings.args, settings.origins, uses, named or f"slime {settings.command}")
    for warning in told:
        logger.warning("%s", warning)
    return told


class _Chosen(NamedTuple):
    """The class or function of a component that the run has, and its traits."""

    part: object
    traits: EngineTraits | TrainerTraits | TransportTraits


def _chosen(parts: Components) -> dict[str, _Chosen]:
    """Return setting -> component, for the transport, the engine and the trainer that the run has."""
    kinds = {
        "update_weight_transport": (parts.weight_transport, TransportTraits),
        "rollout_engine": (parts.engine, EngineTraits),
        "train_backend": (parts.trainer, TrainerTraits),
    }
    return {name: _Chosen(part, traits_of(part, kind)) for name, (part, kind) in kinds.items() if part}


def _check_installed(settings: Settings, chosen: Mapping[str, _Chosen]) -> None:
    """Raise one ConfigError that lists all missing packages of the chosen components, with an alternative if any."""
    missing = {name: part.missing(settings.args) for name, (part, _) in chosen.items() if hasattr(part, "missing")}
    lacking = [f"{settings.cite(name)}: {text}" for name, text in missing.items() if text]
    if not lacking:
        return
    by_auto = [flag_specs()[n].flag for n, text in missing.items() if text and settings.origins[n].kind == "auto"]
    way = " ".join(f"{flag} {WITHOUT_FLAGS}" for flag in by_auto)
    raise ConfigError("\n".join(lacking) + (f"\nOr go on without: type {way}" if way else ""))


# By config.json alone, since a trainer may know families that no plugin here describes.
_NUMBER_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of this field in HF configurations."""


def check_routed_model(settings: Settings) -> None:
    """Raise ConfigError if routing replay is on and the model, if it is there, is dense."""
    args = settings.args
    if not args.use_routing_replay or not (Path(str(args.hf_checkpoint)) / "config.json").is_file():
        return
    hf = read_hf_config(str(args.hf_checkpoint))
    if not any(part.get(name) for part in (hf, hf.get("text_config") or {}) for name in _NUMBER_OF_EXPERTS):
        asked = "use_rollout_routing_replay" if args.use_rollout_routing_replay else "use_routing_replay"
        raise ConfigError(
            f"{settings.cite(asked)}: {settings.cite('hf_checkpoint')} is a dense model"
            f" ({hf['model_type']}: no {', '.join(_NUMBER_OF_EXPERTS)} in config.json); remove the flag"
        )
