"""Read an HF `config.json` into `Numbers`: the architecture with the same names for all model families.

Called for presets only, whose keys are known. Models are not built from `Numbers`: the family plugins (kinds `models`
and `megatron_models`) read the same mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in all layers except the first few."""

    number: int
    per_token: int
    ffn_size: int
    """Intermediate size of each expert."""
    shared_size: int
    """Intermediate size of all shared experts together; 0 without shared experts."""
    first_dense: int
    """Layers at the start without experts."""
    score_function: str
    """"softmax" or "sigmoid"."""
    shared_gate: bool = False
    """True if the shared expert's output is multiplied by a learned gate."""
    groups: int = 1
    groups_per_token: int = 1
    """Number of best groups from which a token's experts are chosen."""
    scaling: float = 1.0
    """Factor of the sum of the routed experts."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2)."""

    q_rank: int | None
    """Rank of the compressed queries; None: queries are not compressed."""
    kv_rank: int
    qk_size: int
    """Size of a head's queries and keys, without the rotated part."""
    rope_size: int
    """Size of the rotated part, which all heads share for keys."""
    value_size: int


@dataclass(frozen=True)
class Indexer:
    """The indexer that chooses the keys of sparse attention (DeepSeek-V3.2)."""

    heads: int
    head_size: int
    keys: int
    """Number of keys that a query attends to."""
    layers: int
    """Number of layers with an indexer; each other layer uses the indexer of a layer before it."""


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta nets in all layers but every `interval`-th (Qwen3-Next)."""

    interval: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_kernel: int


@dataclass(frozen=True)
class Numbers:
    """A decoder's architecture. Sizes are in elements."""

    layers: int
    hidden_size: int
    ffn_size: int
    """Intermediate size of the dense feed-forward block, or of an expert if no layer is dense."""
    heads: int
    kv_groups: int
    """Number of key-value heads."""
    head_size: int
    """Size of a head's queries, keys and values; with `latent`, of the part of a key that is not rotated."""
    vocab_size: int
    rope_base: float
    rope_percent: float
    """Share of a head that is rotated."""
    rope_scaling: Mapping[str, Any] | None
    """HF's scaling mapping, with its kind under "rope_type"; None for plain rotary positions."""
    norm_epsilon: float
    tied: bool
    """True if the output layer is the embedding."""
    max_positions: int
    qkv_bias: bool
    qk_norm: bool
    qk_norm_all_heads: bool
    """True if a single norm covers all heads together, instead of a norm per head."""
    output_gate: bool
    """True if a part of the query projection gates the output of attention (Qwen3-Next)."""
    norms_per_layer: int
    experts: Experts | None
    latent: LatentAttention | None
    delta_net: DeltaNet | None
    indexer: Indexer | None

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.experts.first_dense if self.experts else 0

    @property
    def softmax_layers(self) -> int:
        """Number of layers with softmax attention; the others have delta nets."""
        return self.layers // self.delta_net.interval if self.delta_net else self.layers


def read_numbers(config: Mapping[str, Any], megatron: Mapping[str, Any], norms_per_layer: int = 2) -> Numbers:
    """Read a preset.

    Args:
        config: Contents of config.json; its `text_config` is read for a model with images.
        megatron: Megatron's flags that all models of the family have.
        norms_per_layer: Norms over the hidden size in each layer.
    """
    text = config.get("text_config", config)
    heads, hidden, layers = text["num_attention_heads"], text["hidden_size"], text["num_hidden_layers"]
    latent = _latent(text)
    head_size = latent.qk_size if latent else text.get("head_dim") or hidden // heads
    rope = _rope(text, head_size)
    return Numbers(
        layers=layers,
        hidden_size=hidden,
        ffn_size=text.get("intermediate_size") or text["moe_intermediate_size"],
        heads=heads,
        kv_groups=text["num_key_value_heads"],
        head_size=head_size,
        vocab_size=text["vocab_size"],
        rope_base=float(rope.pop("rope_theta")),
        rope_percent=rope.pop("partial_rotary_factor"),
        rope_scaling=rope if rope["rope_type"] != "default" else None,
        norm_epsilon=text["rms_norm_eps"],
        tied=text["tie_word_embeddings"],
        max_positions=text["max_position_embeddings"],
        qkv_bias=bool(text.get("attention_bias") or megatron.get("add-qkv-bias")),
        qk_norm=bool(text.get("use_qk_norm") or megatron.get("qk-layernorm")),
        qk_norm_all_heads=text.get("qk_norm_type") == "per_layer",
        output_gate=bool(megatron.get("attention-output-gate")),
        norms_per_layer=norms_per_layer,
        experts=_experts(text, megatron),
        latent=latent,
        delta_net=_delta_net(text),
        indexer=_indexer(text, layers),
    )


def _rope(text: Mapping[str, Any], head_size: int) -> dict[str, Any]:
    """Either spelling of the rotary settings: `rope_parameters`, or keys of their own."""
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", text.get("rope_theta"))
    rotated = text.get("rotary_dim")
    rope.setdefault("partial_rotary_factor", text.get("partial_rotary_factor", rotated / head_size if rotated else 1.0))
    return rope


def _experts(text: Mapping[str, Any], megatron: Mapping[str, Any]) -> Experts | None:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    number = next((text[name] for name in names if text.get(name)), 0)
    if not number:
        return None
    size = text.get("moe_intermediate_size") or text["intermediate_size"]
    return Experts(
        number=number,
        per_token=text["num_experts_per_tok"],
        ffn_size=size,
        shared_size=text.get("shared_expert_intermediate_size", text.get("n_shared_experts", 0) * size),
        first_dense=text.get("first_k_dense_replace", 0),
        score_function=megatron["moe-router-score-function"],
        shared_gate=bool(megatron.get("moe-shared-expert-gate")),
        groups=text.get("n_group", 1),
        groups_per_token=text.get("topk_group", 1),
        scaling=text.get("routed_scaling_factor", 1.0),
    )


def _latent(text: Mapping[str, Any]) -> LatentAttention | None:
    if "kv_lora_rank" not in text:
        return None
    return LatentAttention(
        q_rank=text["q_lora_rank"],
        kv_rank=text["kv_lora_rank"],
        qk_size=text["qk_nope_head_dim"],
        rope_size=text["qk_rope_head_dim"],
        value_size=text["v_head_dim"],
    )


def _delta_net(text: Mapping[str, Any]) -> DeltaNet | None:
    if "linear_num_key_heads" not in text:
        return None
    return DeltaNet(
        interval=text["full_attention_interval"],
        key_heads=text["linear_num_key_heads"],
        value_heads=text["linear_num_value_heads"],
        key_size=text["linear_key_head_dim"],
        value_size=text["linear_value_head_dim"],
        conv_kernel=text["linear_conv_kernel_dim"],
    )


def _indexer(text: Mapping[str, Any], layers: int) -> Indexer | None:
    if "index_topk" not in text:
        return None
    # transformers' GlmMoeDsaConfig: layers from `offset - 1` on share one indexer per `freq`.
    every, offset = text.get("index_topk_freq", 1), text.get("index_skip_topk_offset", 2)
    own = sum(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))
    return Indexer(text["index_n_heads"], text["index_head_dim"], text["index_topk"], own)
