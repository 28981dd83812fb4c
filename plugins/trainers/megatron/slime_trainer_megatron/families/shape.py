"""Facts that the core needs about a model whose family only Megatron knows: shape, and layers with experts."""

from __future__ import annotations

from pathlib import Path

from slime_core.models.family import DecoderShape, RoutedLayers
from slime_trainer_megatron.families.family import Architecture, load_megatron_model


def decoder_shape(directory: str | Path) -> DecoderShape:
    """Return the shape of an HF-layout model; latent attention (MLA) counts as attention of its query and value sizes.

    Raises:
        ConfigError: `config.json` is missing or belongs to another kind of model.
        PluginNotFoundError: No plugin knows the family.
    """
    architecture = load_megatron_model(directory).architecture
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


def routed_layers(directory: str | Path) -> RoutedLayers:
    """Return the layers with experts of an HF-layout model. Raises the errors of `decoder_shape`."""
    architecture = load_megatron_model(directory).architecture
    return RoutedLayers(
        architecture.num_layers,
        layers_with_experts(architecture),
        architecture.num_experts,
        int(architecture.transformer["moe_router_topk"]),
    )


def layers_with_experts(architecture: Architecture) -> tuple[int, ...]:
    """Return the numbers of layers with experts from Megatron's `moe_layer_freq`: a list of flags, or every n-th."""
    frequency, count = architecture.transformer.get("moe_layer_freq", 1), architecture.num_layers
    has = [i % frequency == 0 for i in range(count)] if isinstance(frequency, int) else list(frequency)
    return tuple(i for i in range(count) if has[i])
