"""Merges of HF tensors into Megatron's parameters, and the rows of decoders that most families share.

Plugins of kind "megatron_models" build their map from these; the Megatron trainer's `weights_in` and `weights_out` use
it. A merge only moves numbers, so the conversion in both directions is bitwise exact, and it works for gradients, too.
Tensors may have any dtype and device. The module imports only the code that moves tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slime_trainer_megatron.families.family import Architecture, MegatronModel, Merge, Row

if TYPE_CHECKING:
    import torch

HEAD = ("score.weight", "score.bias")
"""HF's names of a critic's head, the same as in its models for token classification."""


def _cat(tensors: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
    import torch

    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), axis)


def _part(tensor: torch.Tensor, rank: int, size: int, axis: int = 0) -> torch.Tensor:
    """Return part `rank` of `size` equal parts. Raises ValueError if the axis does not divide."""
    if tensor.shape[axis] % size:
        raise ValueError(f"axis {axis} of {tuple(tensor.shape)} does not divide into {size} equal parts")
    length = tensor.shape[axis] // size
    return tensor.narrow(axis, rank * length, length)


@dataclass(frozen=True)
class Whole(Merge):
    """The merge of a tensor that is the same on every rank: norms, routers."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """[...] -> [...]."""
        (tensor,) = tensors
        return tensor

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the first rank's tensor."""
        return [parts[0]]


@dataclass(frozen=True)
class Columns(Merge):
    """The merge of Megatron's `ColumnParallelLinear` and embedding: rank r holds part r of axis 0, the outputs."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """[out, ...] -> [out / size, ...]."""
        (tensor,) = tensors
        return _part(tensor, rank, size)

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the ranks' parts joined along axis 0, as a single tensor."""
        return [_cat(parts)]

    def read_axis(self, size: int) -> int | None:
        """Axis 0."""
        return 0


@dataclass(frozen=True)
class Rows(Merge):
    """The merge of Megatron's `RowParallelLinear`: rank r holds part r of axis 1, the inputs."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """[out, in] -> [out, in / size]."""
        (tensor,) = tensors
        return _part(tensor, rank, size, 1)

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the ranks' parts joined along axis 1, as a single tensor."""
        return [_cat(parts, 1)]

    def read_axis(self, size: int) -> int | None:
        """Axis 1."""
        return 1


@dataclass(frozen=True)
class Gated(Merge):
    """(gate, up) -> `linear_fc1`: every rank holds its part of the gate above its part of the up projection."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """Two of [ffn, ...] -> [2 ffn / size, ...]."""
        gate, up = tensors
        return _cat([_part(gate, rank, size), _part(up, rank, size)])

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return [gate, up]."""
        halves = [part.chunk(2, 0) for part in parts]
        return [_cat([half[i] for half in halves]) for i in (0, 1)]

    def read_axis(self, size: int) -> int | None:
        """Axis 0 of both."""
        return 0


@dataclass(frozen=True)
class GatedFused(Merge):
    """HF's fused `gate_up_proj`, the gate above the up projection -> `linear_fc1`."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """[2 ffn, ...] -> [2 ffn / size, ...]."""
        (fused,) = tensors
        return Gated().to_megatron(fused.chunk(2, 0), rank, size)

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the fused `gate_up_proj`, as a single tensor."""
        return [_cat(Gated().to_hf(parts))]


@dataclass(frozen=True)
class QKV(Merge):
    """(q, k, v) weights or biases -> `linear_qkv`, interleaved group by group: a group's query heads, its key head,
    its value head (megatron/core/transformer/attention.py, `get_query_key_value_tensors`).

    With more tensor-parallel ranks than groups, a group is cut into parts, the same as in Megatron.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    gated: bool = False
    """True if HF's q has for each head the query and a gate of the attention's output (Qwen3-Next). Megatron stores all
    queries of a group before all of its gates."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """[heads * dim (twice if gated), ...], two of [groups * dim, ...] -> [all of them / size, ...]."""
        q, k, v = tensors
        rest = q.shape[1:]
        heads = self.num_heads // self.num_groups
        if self.gated:
            q = q.reshape(-1, heads, 2, self.head_dim, *rest).transpose(1, 2)
            q = q.reshape(-1, 2 * heads * self.head_dim, *rest)
        else:
            q = q.reshape(-1, heads * self.head_dim, *rest)
        k, v = (tensor.reshape(-1, self.head_dim, *rest) for tensor in (k, v))
        return _part(_cat([q, k, v], 1).reshape(-1, *rest), rank, size)

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return [q, k, v]."""
        merged = _cat(parts)
        rest, heads = merged.shape[1:], self.num_heads // self.num_groups
        of_queries = heads * self.head_dim * (2 if self.gated else 1)
        groups = merged.reshape(self.num_groups, of_queries + 2 * self.head_dim, *rest)
        k = groups.narrow(1, of_queries, self.head_dim)
        v = groups.narrow(1, of_queries + self.head_dim, self.head_dim)
        q = groups.narrow(1, 0, of_queries)
        if self.gated:
            q = q.reshape(self.num_groups, 2, heads, self.head_dim, *rest).transpose(1, 2)
        return [tensor.reshape(-1, *rest) for tensor in (q, k, v)]

    def read_axis(self, size: int) -> int | None:
        """Axis 0 of all three while every rank has whole groups."""
        return 0 if self.num_groups % size == 0 else None


LAYER = "model.layers.{layer}."
"""Prefix of HF's names of a layer."""
_MEGATRON = "decoder.layers.{layer}."


def embedding_rows(
    architecture: Architecture,
    *,
    embedding: str = "model.embed_tokens.weight",
    norm: str = "model.norm.weight",
    head: str = "lm_head.weight",
) -> list[Row]:
    """Return the rows of word embedding, final norm and output layer; a tied output layer has no tensor and no row."""
    rows = [
        Row("embedding.word_embeddings.weight", (embedding,), Columns(), vocabulary=True),
        Row("decoder.final_layernorm.weight", (norm,), Whole(), "replicated"),
    ]
    if not architecture.tie_word_embeddings:
        rows.append(Row("output_layer.weight", (head,), Columns(), vocabulary=True))
    return rows


def attention_rows(
    architecture: Architecture,
    *,
    layers: tuple[int, ...] | None = None,
    norm: str = "input_layernorm",
    gated: bool = False,
    attention: str = "self_attn",
) -> list[Row]:
    """Return the rows of a norm and grouped-query attention; `architecture.transformer` sets biases and q, k norms.

    Args:
        architecture: Architecture of the model.
        layers: Layers with this attention; None for all.
        norm: HF's name of the norm before the attention.
        gated: See `QKV.gated`.
        attention: HF's name of the attention block.
    """
    fields = architecture.transformer
    merge = QKV(fields["num_attention_heads"], fields["num_query_groups"], fields["kv_channels"], gated)
    everywhere = bool(fields.get("add_bias_linear", True))
    rows = [_norm_row("input_layernorm", norm, layers)]
    for kind in ("weight", "bias") if everywhere or fields.get("add_qkv_bias") else ("weight",):
        names = tuple(f"{LAYER}{attention}.{x}_proj.{kind}" for x in "qkv")
        rows.append(Row(f"{_MEGATRON}self_attention.linear_qkv.{kind}", names, merge, layers=layers))
    if fields.get("qk_layernorm"):
        rows += [_norm_row(f"self_attention.{x}_layernorm", f"{attention}.{x}_norm", layers) for x in "qk"]
    rows += _down_rows("self_attention.linear_proj", f"{LAYER}{attention}.o_proj", everywhere, layers)
    return rows


def dense_mlp_rows(
    architecture: Architecture,
    *,
    layers: tuple[int, ...] | None = None,
    norm: str = "post_attention_layernorm",
    fused: bool = False,
    mlp: str = "mlp",
) -> list[Row]:
    """A norm, then a gated feed-forward block.

    Args:
        architecture: Of the model; with `add_bias_linear` there are biases.
        layers: The layers that have it; None is all.
        norm: HF's name of the norm before it.
        fused: HF has one `gate_up_proj` instead of `gate_proj` and `up_proj`.
        mlp: HF's name of the block.
    """
    bias = bool(architecture.transformer.get("add_bias_linear", True))
    rows = [_norm_row("pre_mlp_layernorm", norm, layers)]
    up = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    for kind in ("weight", "bias") if bias else ("weight",):
        names = tuple(f"{LAYER}{mlp}.{name}.{kind}" for name in up)
        merge: Merge = GatedFused() if fused else Gated()
        rows.append(Row(f"{_MEGATRON}mlp.linear_fc1.{kind}", names, merge, layers=layers))
    return rows + _down_rows("mlp.linear_fc2", f"{LAYER}{mlp}.down_proj", bias, layers)


def expert_rows(
    *,
    layers: tuple[int, ...] | None = None,
    norm: str = "post_attention_layernorm",
    mlp: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    expert_bias: str | None = None,
    shared: str | None = None,
    shared_gate: str | None = None,
) -> list[Row]:
    """A norm, then a router and one gated feed-forward block per expert, without biases.

    Args:
        layers: The layers that have experts; None is all.
        norm: HF's name of the norm before it.
        mlp: HF's name of the block, which holds `gate` and `experts`.
        names: HF's names of an expert's gate, up and down projections.
        expert_bias: HF's name, within the block, of what is added to the scores to choose experts, as
            "gate.e_score_correction_bias".
        shared: HF's name, within the block, of the experts that every token passes, as "shared_experts".
        shared_gate: HF's name, within the block, of their gate (Qwen's "shared_expert_gate").
    """
    block, ours = f"{LAYER}{mlp}.", f"{_MEGATRON}mlp."
    gate, up, down = (f"{block}experts.{{expert}}.{name}.weight" for name in names)
    rows = [
        _norm_row("pre_mlp_layernorm", norm, layers),
        Row(f"{ours}router.weight", (f"{block}gate.weight",), Whole(), "replicated", layers),
    ]
    if expert_bias:
        rows.append(Row(f"{ours}router.expert_bias", (block + expert_bias,), Whole(), "replicated", layers))
    experts = f"{ours}experts.local_experts.{{expert}}."
    rows += [
        Row(f"{experts}linear_fc1.weight", (gate, up), Gated(), "expert_tensor", layers),
        Row(f"{experts}linear_fc2.weight", (down,), Rows(), "expert_tensor", layers),
    ]
    if shared:
        gate, up, down = (f"{block}{shared}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))
        rows += [
            Row(f"{ours}shared_experts.linear_fc1.weight", (gate, up), Gated(), layers=layers),
            Row(f"{ours}shared_experts.linear_fc2.weight", (down,), Rows(), layers=layers),
        ]
    if shared_gate:
        name = f"{block}{shared_gate}.weight"
        rows.append(Row(f"{ours}shared_experts.gate_weight", (name,), Whole(), "replicated", layers))
    return rows


def critic_of(model: MegatronModel) -> MegatronModel:
    """The value model over the same body: instead of the output layer a linear head to one value, on every rank
    whole, in HF's layout of token classification."""
    weight, bias = HEAD
    rows = [row for row in model.rows if not row.megatron.startswith("output_layer.")]
    rows.append(Row("output_layer.weight", (weight,), Whole(), "replicated"))
    rows.append(Row("output_layer.bias", (bias,), Whole(), "replicated"))
    return replace(model, architecture=replace(model.architecture, tie_word_embeddings=False), rows=rows)


def _norm_row(megatron: str, hf: str, layers: tuple[int, ...] | None) -> Row:
    return Row(f"{_MEGATRON}{megatron}.weight", (f"{LAYER}{hf}.weight",), Whole(), "replicated", layers)


def _down_rows(megatron: str, hf: str, bias: bool, layers: tuple[int, ...] | None) -> list[Row]:
    """A row-parallel linear; its bias is added after the sum over ranks, so that every rank has all of it."""
    rows = [Row(f"{_MEGATRON}{megatron}.weight", (f"{hf}.weight",), Rows(), layers=layers)]
    if bias:
        rows.append(Row(f"{_MEGATRON}{megatron}.bias", (f"{hf}.bias",), Whole(), "replicated", layers))
    return rows
