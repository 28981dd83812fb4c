"""GLM-4.5's `config.json` -> its Megatron model: grouped-query attention, and experts behind the first layers.

Entry point of kind "megatron_models". Half of every head is rotated. The experts are routed as DeepSeek-V3's. GLM-4.5
has norms of queries and keys, GLM-4.5-Air has none (`use_qk_norm`). The numbers of `Glm4MoeConfig` stand in for what a
file leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_trainer_megatron.families import (
    MegatronModel,
    attention_rows,
    carried_layers,
    decoder_architecture,
    decoder_rows,
    first_dense,
    routing_fields,
)

DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
}


def megatron(hf: Mapping[str, Any]) -> MegatronModel:
    """`config.json` of a `Glm4MoeForCausalLM` -> architecture and map.

    Raises:
        ConfigError: A field is missing or has a value that Megatron's layers do not compute.
    """
    hf = {**DEFAULTS, **hf}
    sparse = first_dense(hf, default=1)
    architecture = decoder_architecture(
        hf,
        add_qkv_bias=bool(hf.get("attention_bias", False)),
        qk_layernorm=bool(hf.get("use_qk_norm", False)),
        **routing_fields(hf, sparse),
    )
    rows = decoder_rows(architecture, attention_rows(architecture), sparse)
    return MegatronModel(architecture, rows, carried=carried_layers(hf))
