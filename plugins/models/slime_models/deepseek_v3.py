"""DeepSeek-V3's `config.json` -> its Megatron model: latent attention, and experts behind the first layers.

Entry point of kind "megatron_models". DeepSeek-V3, V3.1 and R1 have a low rank for queries, Moonlight has none. The
numbers of `DeepseekV3Config` stand in for what a file leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_trainer_megatron.families import MegatronModel, first_dense, latent_attention_model

DEFAULTS = {"n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5}


def megatron(hf: Mapping[str, Any]) -> MegatronModel:
    """`config.json` of a `DeepseekV3ForCausalLM` -> architecture and map.

    Raises:
        ConfigError: A field is missing or has a value that Megatron's layers do not compute.
    """
    return latent_attention_model(hf, first_dense(hf, default=3), DEFAULTS)
