"""Qwen3-MoE: Qwen3's attention, and in most layers routed SwiGLU experts instead of one feed-forward block.

Sparse are the layers whose number plus one is a multiple of `decoder_sparse_step`, but for those in `mlp_only_layers`.
The router's auxiliary loss (`router_aux_loss_coef`) is no part of RL training and is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_core.models.config import ModelConfig, MoEConfig


def model(hf: Mapping[str, Any]) -> ModelConfig:
    """`config.json` of a `Qwen3MoeForCausalLM` -> architecture.

    Raises:
        ConfigError: A field is missing, the experts do not fit together, or sliding windows are asked for.
    """
    if hf.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window true is not supported; allowed: false")
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig.from_hf({"head_dim": 128, **hf}, moe=_experts(hf), qkv_bias=bias, o_bias=bias, qk_norm=True)


def _experts(hf: Mapping[str, Any]) -> MoEConfig | None:
    """None where no layer has any; transformers writes the number of experts under one of two names."""
    fields: dict[str, Any] = {
        name: hf.get(name) for name in ("num_hidden_layers", "num_experts_per_tok", "moe_intermediate_size")
    }
    fields["num_experts"] = hf.get("num_experts", hf.get("num_local_experts"))
    missing = [name for name, value in fields.items() if value is None]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(map(repr, missing))}, which every Qwen3-MoE needs")
    number, per_token = int(fields["num_experts"]), int(fields["num_experts_per_tok"])
    step, dense = int(hf.get("decoder_sparse_step") or 1), set(hf.get("mlp_only_layers") or ())
    layers = tuple(i for i in range(int(fields["num_hidden_layers"])) if (i + 1) % step == 0 and i not in dense)
    if not number or not layers:
        return None
    if not 0 < per_token <= number:
        raise ConfigError(f"config.json: num_experts_per_tok {per_token} of {number} experts; allowed: 1 to {number}")
    return MoEConfig(
        num_experts=number,
        experts_per_token=per_token,
        intermediate_size=int(fields["moe_intermediate_size"]),
        normalize_top_k=bool(hf.get("norm_topk_prob", False)),
        layers=layers,
    )
