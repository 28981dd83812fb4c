"""Kimi K2's `config.json` -> its Megatron model: DeepSeek-V3's layers with half the heads and more experts.

Entry point of kind "megatron_models". transformers has no class of this `model_type`; the files come with code of
their own, which is DeepSeek-V3's. The experts are one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_trainer_megatron.families import MegatronModel, first_dense, latent_attention_model

DEFAULTS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.827}


def megatron(hf: Mapping[str, Any]) -> MegatronModel:
    """`config.json` of a Kimi K2 -> architecture and map.

    Raises:
        ConfigError: A field is missing or has a value that Megatron's layers do not compute.
    """
    return latent_attention_model(hf, first_dense(hf, default=1), DEFAULTS)
