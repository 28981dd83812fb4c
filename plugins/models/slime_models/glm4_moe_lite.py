"""GLM-4.7-Flash's `config.json` -> its Megatron model: DeepSeek-V3's layers, dense ones named by `mlp_layer_types`.

Entry point of kind "megatron_models". The numbers of `Glm4MoeLiteConfig` stand in for what a file leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_trainer_megatron.families import MegatronModel, first_dense, latent_attention_model

from slime_core.errors import ConfigError

DEFAULTS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}


def megatron(hf: Mapping[str, Any]) -> MegatronModel:
    """`config.json` of a `Glm4MoeLiteForCausalLM` -> architecture and map.

    Raises:
        ConfigError: A field is missing or has a value that Megatron's layers do not compute.
    """
    return latent_attention_model(hf, _sparse(hf), DEFAULTS)


def _sparse(hf: Mapping[str, Any]) -> list[bool]:
    """Per layer, whether it has experts; files of before `mlp_layer_types` count the dense ones."""
    kinds = hf.get("mlp_layer_types")
    by_number = first_dense(hf, default=1)
    if kinds is None:
        return by_number
    if len(kinds) != len(by_number) or not set(kinds) <= {"dense", "sparse"}:
        raise ConfigError(
            f"config.json: mlp_layer_types {kinds!r}; allowed: 'dense' or 'sparse' for each of {len(by_number)} layers"
        )
    return [kind == "sparse" for kind in kinds]
