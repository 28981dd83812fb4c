"""Checks of flags, model and layout that are possible before a process starts.

`MegatronTrainer.check_settings` calls them, so `slime check` and the start of every run do. They read config.json, and
no weights. Actor and critic share their processes, so their parallel sizes are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from slime_embedded.trainer.shared_settings import Role

from slime_core.errors import ConfigError
from slime_core.launch.roles import role_args
from slime_core.models.config import read_hf_config
from slime_core.protocols import Args
from slime_trainer_megatron.arguments.architecture import COMPARED, check_architecture
from slime_trainer_megatron.arguments.config import PRECISION_AWARE, padded_vocab_size
from slime_trainer_megatron.arguments.flags import shown
from slime_trainer_megatron.arguments.owned import NOT_ON_CPU, REFUSED_ON_CPU
from slime_trainer_megatron.arguments.role_settings import ROLES
from slime_trainer_megatron.arguments.values import given as given_value
from slime_trainer_megatron.arguments.values import given_fields, recompute_granularity
from slime_trainer_megatron.chosen import trained_names
from slime_trainer_megatron.families.family import Architecture, load_megatron_model
from slime_trainer_megatron.installed import check_installed
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.settings import MegatronSettings

_RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""Modules that `recompute_modules` may name (transformer_config.py)."""
_OF_GRANULARITY: Mapping[str, tuple[str, ...]] = {
    "full": ("recompute_method", "recompute_num_layers"),
    "selective": ("recompute_modules",),
}
"""--recompute-granularity -> the flags that refine it."""


def check_run(args: Args) -> list[str]:
    """Compare flags with the models, layouts and the device, for the actor and the roles of --megatron-config-path.

    Args:
        args: The run's settings.

    Returns:
        Warnings about flags that are switched off.

    Raises:
        ConfigError: Megatron is missing, or settings contradict each other; the error lists all problems at once.
    """
    problems: list[ConfigError] = []
    warnings: dict[str, None] = {}
    layouts: dict[Role, Layout] = {}
    with _noted(problems):
        check_installed()
    for role in ROLES:
        if role == "critic" and role not in args.role_settings and not args.critic_load:
            continue  # the actor's model and flags
        own = role_args(args, role)
        settings = None
        with _noted(problems):
            settings = MegatronSettings.from_args(own, role)
            layouts[role] = settings.layout
            warnings |= dict.fromkeys([*_check_device(own, settings), *_check_recompute(own)])
        if settings is not None:
            with _noted(problems):
                _check_routing(own, settings)
        directory = own.hf_checkpoint if settings is None else settings.hf_checkpoint
        if not (Path(directory) / "config.json").is_file():
            continue  # somebody else's complaint, or a recipe makes it
        with _noted(problems):
            family = load_megatron_model(directory)
            architecture = family.architecture
            with _noted(problems):
                check_architecture(own, read_hf_config(directory), architecture)
            if not architecture.num_experts and (idle := _of_experts(own)):
                warnings[f"without effect, since {directory} has no experts: {', '.join(idle)}"] = None
            if settings is not None:
                with _noted(problems):
                    warnings |= dict.fromkeys(trained_names(settings, family)[1])
                _check_split(own, settings, architecture)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(map(str, problems))))
    if args.role_settings or len(set(layouts.values())) > 1:
        _check_shared(args, layouts)
    return list(warnings)


@contextmanager
def _noted(problems: list[ConfigError]) -> Iterator[None]:
    """Collect a ConfigError of the block, to be raised later with the others."""
    try:
        yield
    except ConfigError as error:
        problems.append(error)


def _check_shared(args: Args, layouts: Mapping[Role, Layout]) -> None:
    """Raise ConfigError if a role's parallel sizes are not the run's, since every process holds both roles."""
    whole = MegatronSettings.from_args(args).layout
    for role, layout in layouts.items():
        if layout != whole:
            path = args.megatron_config_path
            cited = f"--megatron-config-path {path!r}" if path else f"--critic-load {args.critic_load!r}"
            raise ConfigError(
                f"{cited}: actor and critic share their processes, so their parallel sizes are the run's: the run has"
                f" {whole.apart_from(layout)}; the {role} has {layout.apart_from(whole)}"
            )


def _of_experts(args: Args) -> list[str]:
    """Return the given flags that affect the experts' computation; flags that describe the model are left out."""
    others = {*COMPARED, *NOT_ON_CPU, "moe_token_dispatcher_type"}
    given = {name: value for name, value in given_fields(args).items() if name.startswith("moe_") and value}
    idle = [shown(name, value) for name, value in given.items() if name not in others]
    split = given_fields(args).get("expert_tensor_parallel_size", 1)
    return [*idle, *([shown("expert_tensor_parallel_size", split)] if split > 1 else [])]


def _check_recompute(args: Args) -> list[str]:
    """Raise ConfigError for recompute flags that Megatron would refuse later; return flags that it would ignore."""
    given, granularity = given_fields(args), recompute_granularity(args)
    if granularity == "selective":
        if "recompute_num_layers" in given:
            raise ConfigError(
                f"{shown('recompute_num_layers', given['recompute_num_layers'])}: with --recompute-granularity"
                " selective parts of every layer are recomputed; remove it, or set full"
            )
        for name in given.get("recompute_modules", ()):
            if name not in _RECOMPUTED:
                raise ConfigError(f"--recompute-modules {name}: allowed: {', '.join(_RECOMPUTED)}")
    idle = [
        shown(name, given[name])
        for of, names in _OF_GRANULARITY.items()
        for name in names
        if of != granularity and name in given
    ]
    without = f"--recompute-granularity {granularity}" if granularity else "no --recompute-granularity"
    return [f"without effect with {without}: {', '.join(idle)}"] if idle else []


def _check_split(args: Args, settings: MegatronSettings, architecture: Architecture) -> None:
    """Check that the model can be split over the ranks."""
    layout = Layout.from_args(args, architecture.num_layers)
    layout.check_model(architecture.transformer)
    padded_vocab_size(args, architecture.vocab_size, layout)
    rate = given_fields(args).get("moe_router_bias_update_rate")
    if rate and not architecture.transformer.get("moe_router_enable_expert_bias"):
        raise ConfigError(
            f"{shown('moe_router_bias_update_rate', rate)}: the model's routers have no bias of experts; remove it"
        )


def _check_routing(args: Args, settings: MegatronSettings) -> None:
    """Check load balancing, and that the router lets routing replay set the experts, which two of its modes do not."""
    given = given_fields(args)
    types = given.get("moe_router_load_balancing_type")
    kinds = types if isinstance(types, list) else [types]
    if "global_aux_loss" in kinds:
        raise ConfigError(
            f"{shown('moe_router_load_balancing_type', types)}: it waits in every layer for ranks that have other"
            " numbers of micro-batches; set aux_loss"
        )
    coefficient = given.get("moe_aux_loss_coeff")
    if types is not None and set(kinds) <= {"none", "sinkhorn"} and coefficient not in (None, 0.0, [0.0] * len(kinds)):
        raise ConfigError(
            f"{shown('moe_aux_loss_coeff', coefficient)}:"
            f" {shown('moe_router_load_balancing_type', types)} has no such loss; set aux_loss or remove one"
        )
    if not args.use_routing_replay:
        return
    if "sinkhorn" in kinds:
        raise ConfigError(
            f"{shown('moe_router_load_balancing_type', types)}: it chooses experts for all tokens together, so"
            " --use-routing-replay cannot name them; remove one"
        )
    if given.get("moe_router_fusion") and _device(settings) != "cpu":
        raise ConfigError(
            "--moe-router-fusion: its kernel chooses experts by itself, so --use-routing-replay cannot name them;"
            " remove one"
        )


def _check_device(args: Args, settings: MegatronSettings) -> list[str]:
    given = given_fields(args)
    warnings = []
    if given.get("sequence_parallel") and not settings.layout.sequence_parallel:
        warnings.append("without effect with --tensor-model-parallel-size 1: --sequence-parallel")
    if given.get("moe_token_dispatcher_type") == "allgather":
        warnings.append(
            "--moe-token-dispatcher-type allgather: it needs sequences of one length; alltoall is used instead"
        )
    if _device(settings) != "cpu":
        return warnings
    refused = [
        f"{shown(name, given[name])}: {why}; on CPU remove it"
        for name, (value, why) in REFUSED_ON_CPU.items()
        if name in given and given[name] != value
    ]
    if refused:
        raise ConfigError("\n".join(refused))
    idle: list[str] = [
        f"{shown(name, given[name])} ({why})"
        for name, (value, why) in NOT_ON_CPU.items()
        if name in given and given[name] != value
    ]
    idle += [
        f"{shown(name, value)} ({NOT_ON_CPU['use_precision_aware_optimizer'][1]})"
        for name in PRECISION_AWARE
        if (value := given_value(args, name)) not in (None, "fp32")
    ]
    if given.get("moe_token_dispatcher_type") == "flex":
        idle.append("--moe-token-dispatcher-type flex (it needs GPUs; alltoall is used instead)")
    return [*warnings, f"switched off on CPU: {', '.join(idle)}"] if idle else warnings


def _device(settings: MegatronSettings) -> str:
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"
