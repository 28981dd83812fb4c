"""Architecture, flags and layout -> megatron-core's own configuration objects.

Called by `model.py`, `optimizer.py` and `trainer.py` of this package; imports Megatron. From low to high: Megatron's
defaults, slime's for RL (no dropout, no balancing of experts), the model's architecture, the user's flags, what slime
owns, what the device dictates. That flags agree with the architecture is checked before (`architecture.py`), and what a
CPU cannot do is warned of before (`checks.py`); here it is only done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from slime_embedded.trainer.shared_settings import Role

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_trainer_megatron.arguments.architecture import COMPARED
from slime_trainer_megatron.arguments.fields import known_fields
from slime_trainer_megatron.arguments.owned import FOR_RL, NO_EFFECT, NOT_ON_CPU
from slime_trainer_megatron.arguments.values import given, given_fields, recompute_granularity
from slime_trainer_megatron.families.family import Architecture
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.settings import MegatronSettings

FUSED_ON_GPU = ("bias_activation_fusion", "bias_dropout_fusion")
"""Fields that are on by default on a GPU; they need only torch."""

PRECISION_AWARE = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Fields that are float32 without the precision-aware optimizer, which a CPU lacks."""

_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
}
"""Megatron's flag values -> dtypes; its optimizer keeps fp8 in bytes."""


def transformer_config(
    args: Args, architecture: Architecture, layout: Layout, *, role: Role = "actor", device: torch.device
) -> Any:
    """Return the model's configuration.

    Args:
        args: The run's settings; every given Megatron flag that is a field is applied.
        architecture: Architecture of the model, from its family.
        layout: Parallel sizes.
        role: "actor" or "critic".
        device: Device that the model runs on.

    Returns:
        `TransformerConfig`, or `MLATransformerConfig` for multi-latent attention, after its own checks.

    Raises:
        ConfigError: Megatron refuses the values.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    latent = bool(architecture.transformer.get("multi_latent_attention"))
    dtype = MegatronSettings.from_args(args, role).compute_dtype(device)
    given = _of(args, "transformer", "mla") if latent else _of(args, "transformer")
    given = {name: value for name, value in given.items() if name not in COMPARED}
    fields: dict[str, Any] = {**FOR_RL, **architecture.transformer, **_recompute(args, given)}
    if device.type != "cpu":
        fields |= dict.fromkeys(FUSED_ON_GPU, True)
        fields["overlap_p2p_comm"] = bool(layout.virtual)
    fields |= given
    if given.get("moe_aux_loss_coeff") and "moe_router_load_balancing_type" not in given:
        fields["moe_router_load_balancing_type"] = "aux_loss"  # Megatron's default
    fields |= {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "batch_p2p_comm": fields.get("batch_p2p_comm", True) and not fields.get("overlap_p2p_comm", False),
    }
    if fields["moe_token_dispatcher_type"] == "allgather" or (
        device.type == "cpu" and fields["moe_token_dispatcher_type"] == "flex"
    ):
        fields["moe_token_dispatcher_type"] = "alltoall"
    _for_device(fields, device, ("transformer", "mla"))
    if device.type == "cpu":
        fields["use_cpu_initialization"] = True
    _typed(fields)
    return _made(MLATransformerConfig if latent else TransformerConfig, fields)


def optimizer_config(args: Args, *, role: Role = "actor", device: torch.device) -> Any:
    """Return Megatron's `OptimizerConfig`, from the run's optimizer settings and Megatron's flags.

    Args:
        args: The run's settings.
        role: "actor" or "critic"; a critic uses `--critic-lr` if it is set.
        device: Device that the model runs on.

    Raises:
        ConfigError: Another optimizer than adam, or Megatron refuses the values.
    """
    from megatron.core.optimizer import OptimizerConfig

    if args.optimizer != "adam":
        raise ConfigError(
            f"--optimizer {args.optimizer}: Megatron's distributed optimizer and its checkpoints know adam only;"
            " remove it"
        )
    settings = MegatronSettings.from_args(args, role)
    dtype = settings.compute_dtype(device)
    names = ("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
    fields = {name: getattr(args, name) for name in names}
    if role == "critic" and args.critic_lr is not None:
        fields["lr"] = args.critic_lr
    fields |= {"use_distributed_optimizer": True, **_of(args, "optimizer")}
    fields |= {"bf16": dtype == torch.bfloat16, "params_dtype": dtype}
    if device.type != "cpu":
        fields |= {name: _DTYPES[value] for name in PRECISION_AWARE if (value := given(args, name))}
    _for_device(fields, device, ("optimizer",))
    _check_overlap(fields, args)
    return _made(OptimizerConfig, fields)


def ddp_config(args: Args, *, role: Role = "actor", device: torch.device) -> Any:
    """Return Megatron's `DistributedDataParallelConfig`; gradients are summed, in float32 for bfloat16 parameters.

    Raises:
        ConfigError: Megatron refuses the values.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    dtype = MegatronSettings.from_args(args, role).compute_dtype(device)
    fields = {"grad_reduce_in_fp32": dtype != torch.float32, "use_distributed_optimizer": True, **_of(args, "ddp")}
    fields["average_in_collective"] = False
    _for_device(fields, device, ("ddp",))
    _check_overlap(fields, args)
    return _made(DistributedDataParallelConfig, fields)


def padded_vocab_size(args: Args, vocab_size: int, layout: Layout) -> int:
    """Return the rows of embedding and output matrices over all tensor-parallel ranks, at least `vocab_size`.

    Args:
        args: The run's settings: --padded-vocab-size, --make-vocab-size-divisible-by.
        vocab_size: Vocabulary size in config.json.
        layout: Parallel sizes; each tensor-parallel rank has the same number of rows.

    Raises:
        ConfigError: --padded-vocab-size is less than the vocabulary, or not divisible.
    """
    step = int(getattr(args, "make_vocab_size_divisible_by", 1)) * layout.tensor  # Megatron's flag
    if step < 1:
        raise ConfigError(f"--make-vocab-size-divisible-by {step // layout.tensor}: at least 1")
    rows = args.padded_vocab_size
    if rows is None:
        return -(-vocab_size // step) * step
    if rows < vocab_size or rows % step:
        raise ConfigError(
            f"--padded-vocab-size {rows}: a multiple of {step} (--make-vocab-size-divisible-by x"
            f" --tensor-model-parallel-size) and not less than the model's vocabulary, {vocab_size}"
        )
    return int(rows)


def _of(args: Args, *owners: str) -> dict[str, Any]:
    """Return the given flags that have an effect and belong to a configuration."""
    fields, given = known_fields().fields, given_fields(args)
    return {n: v for n, v in given.items() if set(fields[n].owners) & set(owners) and n not in NO_EFFECT}


def _recompute(args: Args, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of recomputation; `--recompute-granularity full` alone recomputes every layer."""
    granularity = recompute_granularity(args)
    if granularity is None:
        return {}
    every_layer = {} if granularity == "selective" else {"recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": granularity, **every_layer}


def _for_device(fields: dict[str, Any], device: torch.device, owners: tuple[str, ...]) -> None:
    if device.type == "cpu":
        known = known_fields().fields
        fields |= {name: value for name, (value, _) in NOT_ON_CPU.items() if set(known[name].owners) & set(owners)}


def _typed(fields: dict[str, Any]) -> None:
    """Convert the values for which Megatron expects an enum or a tuple, in place."""
    from megatron.core.transformer.enums import AttnBackend

    if isinstance(fields.get("attention_backend"), str):
        fields["attention_backend"] = AttnBackend[fields["attention_backend"]]
    if fields.get("window_size") is not None:
        fields["window_size"] = tuple(fields["window_size"])


def _check_overlap(fields: Mapping[str, Any], args: Args) -> None:
    if fields.get("overlap_param_gather") and not (
        fields.get("use_distributed_optimizer") and given(args, "overlap_grad_reduce")
    ):
        raise ConfigError("--overlap-param-gather: needs --overlap-grad-reduce and the distributed optimizer; add them")


def _made(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Build Megatron's object. Raises ConfigError with Megatron's message."""
    known = {field.name for field in dataclasses.fields(kind)}
    assert set(fields) <= known, f"{kind.__name__} has no {sorted(set(fields) - known)}"
    try:
        return kind(**fields)
    except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"Megatron's {kind.__name__} refuses the settings: {error}") from error
