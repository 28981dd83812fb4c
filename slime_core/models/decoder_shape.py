"""The numbers by which samples are balanced over ranks, of a model that either kind of family plugin knows.

Called by the learner and by the check of the prompts, which know no trainer. What a reader would get wrong: these are
estimates for balancing. Experts count as those that a token goes through, on average over the layers; latent
attention (MLA) as attention of its query and value sizes; linear attention as if it were full.
"""

from __future__ import annotations

from pathlib import Path

from slime_core.errors import PluginNotFoundError
from slime_core.models.config import load_model_config
from slime_core.models.megatron_family import Architecture, load_megatron_model
from slime_core.models.routed_layers import layers_with_experts
from slime_core.ops.flops import DecoderShape


def decoder_shape(directory: str | Path) -> DecoderShape:
    """Of an HF-layout model.

    Raises:
        ConfigError: `config.json` is not there or is another model's.
        PluginNotFoundError: No plugin knows the family.
    """
    try:
        config = load_model_config(directory)
    except PluginNotFoundError:
        return _of_architecture(load_megatron_model(directory).architecture)
    inner, moe = config.intermediate_size, config.moe
    if moe is not None:
        inner += len(moe.layers) * (moe.experts_per_token * moe.intermediate_size - inner) // config.num_layers
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=inner,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _of_architecture(architecture: Architecture) -> DecoderShape:
    fields = architecture.transformer
    heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
    head_dim = int(fields.get("kv_channels") or hidden // heads)
    if fields.get("multi_latent_attention"):
        query = int(fields["qk_head_dim"]) + int(fields["qk_pos_emb_head_dim"])
        head_dim = (query + int(fields["v_head_dim"])) // 2
    inner = int(fields["ffn_hidden_size"])
    if architecture.num_experts:
        routed = int(fields["moe_router_topk"]) * int(fields["moe_ffn_hidden_size"])
        routed += int(fields.get("moe_shared_expert_intermediate_size") or 0)
        inner += len(layers_with_experts(architecture)) * (routed - inner) // architecture.num_layers
    return DecoderShape(
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=architecture.vocab_size,
        num_layers=architecture.num_layers,
        num_heads=heads,
        num_kv_heads=int(fields.get("num_query_groups") or heads),
        head_dim=head_dim,
    )
