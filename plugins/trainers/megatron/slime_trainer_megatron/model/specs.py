"""Which modules the layers of one pipeline chunk are made of.

Called by `model.py`. On a GPU with Transformer Engine these are its modules, as Megatron chooses them. Elsewhere they
are Megatron's local ones with our norm and core attention in place of its fallbacks, which allow neither sequence
parallelism, nor context parallelism, nor packed sequences. A family changes single layers through `layer_spec`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from slime_embedded.models.lean_autograd import rms_norm
from torch import nn

from slime_core.errors import ConfigError
from slime_trainer_megatron.families.family import MegatronModel

NORMS = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm")


def has_transformer_engine(device: torch.device) -> bool:
    """Whether layers are Transformer Engine's: it is installed and this is a GPU."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE) and device.type == "cuda"


def block_spec(config: Any, model: MegatronModel, *, device: torch.device, vp_stage: int | None) -> Any:
    """The `TransformerBlockSubmodules` of this rank's chunk.

    Args:
        config: The `TransformerConfig`; its `moe_layer_freq` says which layers have experts.
        model: Of the family.
        device: What the model runs on.
        vp_stage: Which chunk of this stage; None without virtual stages.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    engine = has_transformer_engine(device)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=vp_stage
    )
    # Layers of one kind share their spec, and a family may change one of them.
    layers = [copy.deepcopy(spec) for spec in block.layer_specs]
    if not engine:
        from slime_trainer_megatron.model.specs import RMSNorm

        block.layer_norm = RMSNorm
        layers = [_on_torch(spec) for spec in layers]
    if config.multi_latent_attention:
        from slime_trainer_megatron.model.latent_attention import LatentSelfAttention

        for spec in layers:
            spec.submodules.self_attention.module = LatentSelfAttention
    if model.layer_spec is not None:
        offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
        layers = [
            model.layer_spec(spec, config, model.architecture, offset + index) for index, spec in enumerate(layers)
        ]
    block.layer_specs = layers
    return block


def _on_torch(spec: Any) -> Any:
    """The local layer with our norm wherever it has one, and our core attention."""
    from megatron.core.transformer.identity_op import IdentityOp

    from slime_trainer_megatron.model.attention import CoreAttention
    from slime_trainer_megatron.model.specs import RMSNorm

    attention = spec.submodules.self_attention.submodules
    for owner in (spec.submodules, attention):
        for name in NORMS:
            if getattr(owner, name, None) not in (None, IdentityOp):
                setattr(owner, name, RMSNorm)
    attention.core_attention = CoreAttention
    return spec


class RMSNorm(nn.Module):
    """Built by Megatron, which gives these arguments and others that a plain norm has no use for.

    Args:
        config: The `TransformerConfig`.
        hidden_size: Of the last axis.
        eps: Added to the mean square.

    Raises:
        ConfigError: The model has another kind of norm.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ConfigError(
                f"--normalization {config.normalization}: without Transformer Engine only RMSNorm is supported"
            )
        self.eps = eps
        self.zero_centered: bool = config.layernorm_zero_centered_gamma
        """The weight is stored minus one."""
        fill = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(fill(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same."""
        # In float32: next to one, bfloat16 would round most of a weight away.
        weight = self.weight.float() + 1 if self.zero_centered else self.weight
        return rms_norm(x, weight, self.eps)
