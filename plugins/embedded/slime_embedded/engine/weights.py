"""Convert HF-layout tensors to the fused tensors of the model runner, and back.

The core calls this module at load and at every weight update. An update is checked completely before the first byte
changes. Rows of queries and keys are stored with the two halves of each rotary pair adjacent (i, i + head_dim/2), so a
rotation is one complex product; reading a weight restores HF's order. Tokens are grouped by expert, so the number of
rows of an expert's product depends on the batch, and so do the last bits; `--true-on-policy-mode` uses
`invariant_runner.py` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from slime_core.errors import WeightSyncError
from slime_core.models.config import ModelConfig, MoEConfig
from slime_embedded.engine.linear import Linear, packs

NewLinear = Callable[[int, int, bool], Linear]
"""Constructor: (rows, columns, with a bias) -> a projection with undefined contents."""


@dataclass(frozen=True)
class _Place:
    """The place of an HF tensor inside a fused tensor."""

    target: torch.Tensor
    """View of the fused tensor, in HF's order of rows."""
    shape: tuple[int, ...]
    """HF shape."""
    linear: Linear | None = None
    """Projection whose weight contains the tensor."""
    repeated: bool = False
    """True if the target holds the tensor once per head."""

    def write(self, tensor: torch.Tensor) -> None:
        if self.linear is not None and self.linear.pack(tensor, self.target) and self.linear.alone:
            return
        self.target.copy_(tensor.reshape(self.target.shape[1:] if self.repeated else self.target.shape))

    def read(self) -> torch.Tensor:
        return (self.target[0] if self.repeated else self.target).reshape(self.shape)


def _unpaired(rows: torch.Tensor) -> torch.Tensor:
    """Return rotary pairs [heads, head_dim, ...] as a view [heads, 2, head_dim / 2, ...], first halves first."""
    return rows.view(rows.shape[0], -1, 2, *rows.shape[2:]).transpose(1, 2)


class Layer:
    """The fused tensors of one decoder layer."""

    def __init__(self, config: ModelConfig, number: int, new: NewLinear, like: torch.Tensor) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        heads = config.num_heads + 2 * config.num_kv_heads
        self.input_norm, self.mlp_norm = like.new_empty(hidden), like.new_empty(hidden)
        self.qkv = new(heads * dim, hidden, config.qkv_bias)
        heads = config.num_heads + config.num_kv_heads
        # float32, like the queries and keys it scales: a product of two dtypes takes a slow path.
        self.qk_norm = like.new_empty((heads, dim), dtype=torch.float32) if config.qk_norm else None
        self.o = new(hidden, config.num_heads * dim, config.o_bias)
        moe = config.experts_of(number)
        self.mlp: FeedForward | Experts = (
            FeedForward(hidden, config.intermediate_size, config.mlp_bias, new)
            if moe is None
            else Experts(hidden, moe, new, like)
        )

    def places(self, config: ModelConfig) -> Iterator[tuple[str, _Place]]:
        """Yield the HF names below `model.layers.N.` with their places."""
        dim, queries, keys = config.head_dim, config.num_heads, config.num_kv_heads
        starts = {"q": (0, queries), "k": (queries, keys), "v": (queries + keys, keys)}
        for name, (start, heads) in starts.items():
            paired = name != "v"
            for kind, tensor in (("weight", self.qkv.weight), ("bias", self.qkv.bias)):
                if tensor is not None:
                    rows = tensor.view(-1, dim, *tensor.shape[1:])[start : start + heads]
                    shape = (heads * dim, *tensor.shape[1:])
                    owner = self.qkv if kind == "weight" else None
                    yield f"self_attn.{name}_proj.{kind}", _Place(_unpaired(rows) if paired else rows, shape, owner)
            if self.qk_norm is not None and paired:
                norm = self.qk_norm[start : start + heads]
                yield f"self_attn.{name}_norm.weight", _Place(_unpaired(norm), (dim,), repeated=True)
        for name, tensor, owner in self.mlp.tensors():
            yield f"mlp.{name}", _whole(tensor, owner)
        yield "self_attn.o_proj.weight", _whole(self.o.weight, self.o)
        if self.o.bias is not None:
            yield "self_attn.o_proj.bias", _whole(self.o.bias)
        yield "input_layernorm.weight", _whole(self.input_norm)
        yield "post_attention_layernorm.weight", _whole(self.mlp_norm)


def _whole(tensor: torch.Tensor, linear: Linear | None = None) -> _Place:
    return _Place(tensor, tuple(tensor.shape), linear)


def complete(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, origin: str
) -> dict[str, torch.Tensor]:
    """Return a set of HF tensors by name, without those that a model does not hold, such as a tied output layer.

    Raises:
        WeightSyncError: A name is missing, unknown or given twice, or a shape differs. `origin` names the source.
    """
    given: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name in given:
            raise WeightSyncError(f"{origin}: tensor {name!r} given twice; the old weights still serve")
        given[name] = tensor
    if config.tie_word_embeddings:
        given.pop("lm_head.weight", None)
    given = {name: tensor for name, tensor in given.items() if not name.endswith("rotary_emb.inv_freq")}
    wrong = [
        f"{name} {tuple(given[name].shape)} instead of {shape}"
        for name, shape in shapes.items()
        if name in given and tuple(given[name].shape) != shape
    ]
    problems = [
        f"{what} {', '.join(sorted(names)[:5])}{' ...' if len(names) > 5 else ''}"
        for what, names in (
            ("missing", shapes.keys() - given.keys()),
            ("unknown", given.keys() - shapes.keys()),
            ("wrong shape:", wrong),
        )
        if names
    ]
    if problems:
        raise WeightSyncError(
            f"{origin}: not the {len(shapes)} tensors of this {config.model_type} model: {'; '.join(problems)};"
            " nothing was changed"
        )
    return given


class FusedWeights:
    """All fused tensors of the model; their contents are undefined until the first `update`."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, kernels: Any = None) -> None:
        self.config, self.kernels = config, kernels  # compiled `decode.c`, or None
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self._room = self.embedding.new_empty(0)
        """Buffer for a weight that is kept only in packed form, until it is packed; sized for the largest weight."""
        self.layers = [Layer(config, i, self._new_linear, self.embedding) for i in range(config.num_layers)]
        self.final_norm = torch.empty(config.hidden_size, device=device, dtype=dtype)
        head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        self.lm_head = Linear(head, None, kernels=kernels)
        self._places = {
            "model.embed_tokens.weight": _whole(self.embedding, self.lm_head if config.tie_word_embeddings else None),
            "model.norm.weight": _whole(self.final_norm),
        }
        if not config.tie_word_embeddings:
            self._places["lm_head.weight"] = _whole(head, self.lm_head)
        for i, layer in enumerate(self.layers):
            self._places |= {f"model.layers.{i}.{name}": place for name, place in layer.places(config)}
        self._owners: dict[Linear | None, list[str]] = {}
        """Projection -> names of the tensors in its weight; None -> all other names."""
        for name, place in self._places.items():
            self._owners.setdefault(place.linear, []).append(name)

    def _new_linear(self, rows: int, columns: int, bias: bool) -> Linear:
        like, size = self.embedding, rows * columns
        alone = self.kernels is not None or packs(like.device, like.dtype, size)
        if alone and size > self._room.numel():
            self._room = like.new_empty(size)
        weight = self._room[:size].view(rows, columns) if alone else like.new_empty((rows, columns))
        return Linear(weight, like.new_empty(rows) if bias else None, alone, self.kernels)

    def complete(self, weights: Iterable[tuple[str, torch.Tensor]], origin: str) -> dict[str, torch.Tensor]:
        """Return a complete set of HF tensors by name. Raises WeightSyncError as `update` does."""
        return complete(weights, {name: place.shape for name, place in self._places.items()}, self.config, origin)

    @torch.inference_mode()
    def update(self, weights: Iterable[tuple[str, torch.Tensor]], origin: str) -> None:
        """Copy a complete set of HF tensors in, or change nothing.

        Raises:
            WeightSyncError: A name is missing, unknown or given twice, or a shape differs. `origin` names the
                source of the tensors.
        """
        given = self.complete(weights, origin)
        for linear, names in self._owners.items():
            for name in names:
                self._places[name].write(given[name])
            if linear is not None:
                linear.repack()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return views that together cover every fused tensor."""
        return (place.target for place in self._places.values())

    @property
    def packed_bytes(self) -> int:
        """Size in bytes of the packed copies, in addition to the fused tensors."""
        return sum(linear.packed.nbytes for linear in filter(None, self._owners) if linear.packed is not None)

    def drop_packed(self) -> None:
        """Free the packed copies until the next `update`."""
        for linear in filter(None, self._owners):
            linear.packed = None

    @torch.inference_mode()
    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield HF names and tensors in HF layout; some tensors are copies."""
        for linear, names in self._owners.items():
            if linear is not None:
                linear.unpack()
            for name in names:
                tensor = self._places[name].read().to(self.embedding.dtype)
                yield name, tensor.clone() if linear is not None and linear.alone else tensor


class FeedForward:
    """The MLP `down(silu(gate(x)) * up(x))`; gate and up projections are one matrix."""

    def __init__(self, hidden: int, inner: int, bias: bool, new: NewLinear) -> None:
        self.gate_up, self.down = new(2 * inner, hidden, bias), new(hidden, inner, bias)
        self.inner = inner

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """Return [T, hidden] for inputs [T, hidden]; `routed` is not changed."""
        both = self.gate_up(x)
        return self.down(F.silu(both[:, : self.inner]).mul_(both[:, self.inner :]))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, Linear | None]]:
        """Yield HF names below `mlp.`, views, and the projections whose weights contain them."""
        for name, rows in (("gate", slice(0, self.inner)), ("up", slice(self.inner, None))):
            yield f"{name}_proj.weight", self.gate_up.weight[rows], self.gate_up
            if self.gate_up.bias is not None:
                yield f"{name}_proj.bias", self.gate_up.bias[rows], None
        yield "down_proj.weight", self.down.weight, self.down
        if self.down.bias is not None:
            yield "down_proj.bias", self.down.bias, None


class Experts:
    """The router and experts of a layer: `models.feed_forward.MixtureOfExperts` without gradients."""

    def __init__(self, hidden: int, moe: MoEConfig, new: NewLinear, like: torch.Tensor) -> None:
        self.moe = moe
        self.router = like.new_empty(moe.num_experts, hidden)
        self.experts = [FeedForward(hidden, moe.intermediate_size, False, new) for _ in range(moe.num_experts)]

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """Return [T, hidden] for inputs [T, hidden]; write the chosen experts to `routed` [T, k]."""
        k = self.moe.experts_per_token
        probabilities = torch.softmax(F.linear(x, self.router).float(), dim=-1)
        chosen = torch.topk(probabilities, k, dim=-1).indices.sort(dim=-1).values
        if routed is not None:
            routed.copy_(chosen)
        weights = probabilities.gather(1, chosen)
        if self.moe.normalize_top_k:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        parts = torch.split(x[order // k], counts)
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, parts) if len(part)])
        by_token = torch.empty_like(outputs).index_copy_(0, order, outputs).view(-1, k, x.shape[1])
        return (by_token * weights[:, :, None]).sum(1).to(x.dtype)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, Linear | None]]:
        """Yield HF names below `mlp.`, views, and the projections whose weights contain them."""
        yield "gate.weight", self.router, None
        for i, expert in enumerate(self.experts):
            yield from ((f"experts.{i}.{name}", tensor, owner) for name, tensor, owner in expert.tensors())
