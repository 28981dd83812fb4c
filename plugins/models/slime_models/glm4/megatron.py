"""GLM-4's `config.json` -> its Megatron model: four norms a layer, and one matrix for gate and up projection.

Entry point of kind "megatron_models". Half of every head is rotated, in pairs of neighbours. HF's
`post_attention_layernorm` is the norm before the feed-forward block; the ones on the outputs of attention and
feed-forward block are `post_self_attn_layernorm` and `post_mlp_layernorm` (`layers.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_trainer_megatron.families import (
    LAYER,
    Architecture,
    MegatronModel,
    Row,
    Whole,
    attention_rows,
    decoder_architecture,
    dense_mlp_rows,
    embedding_rows,
)

OUTPUT_NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm")
"""In Megatron's layer as in HF's."""


def megatron(hf: Mapping[str, Any]) -> MegatronModel:
    """`config.json` of a `Glm4ForCausalLM` -> architecture and map.

    Raises:
        ConfigError: A field is missing or has a value that Megatron's layers do not compute.
    """
    hf = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, **hf}
    architecture = decoder_architecture(hf, add_qkv_bias=bool(hf.get("attention_bias", True)), rotary_interleaved=True)
    embedding, *rest = embedding_rows(architecture)
    norms = [
        Row(f"decoder.layers.{{layer}}.{name}.weight", (f"{LAYER}{name}.weight",), Whole(), "replicated")
        for name in OUTPUT_NORMS
    ]
    attention, mlp = attention_rows(architecture), dense_mlp_rows(architecture, fused=True)
    return MegatronModel(architecture, [embedding, *attention, *mlp, *norms, *rest], _layer_spec)


def _layer_spec(spec: Any, config: Any, architecture: Architecture, layer: int) -> Any:
    from slime_models.glm4.layers import SandwichLayer

    return dataclasses.replace(spec, module=SandwichLayer)
