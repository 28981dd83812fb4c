"""`ModelConfig` -> the torch module that is trained: packed token ids in, hidden states out.

The trainer calls `Decoder.hidden` and multiplies with `Decoder.head_weight` itself, in chunks, because the full
logits are the largest tensor of a training step. Parameter names are HF's, so a state dict is an HF checkpoint.
The rotation is `rope`'s, which the embedded engine uses too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from slime_core.models.config import ModelConfig
from slime_embedded.models.feed_forward import FeedForward, MixtureOfExperts
from slime_embedded.models.lean_autograd import Linear, attend, rms_norm, rotate
from slime_embedded.models.logprobs import token_log_probs
from slime_embedded.models.packed import PackedLayout
from slime_embedded.models.rope import rope_cos_sin
from slime_embedded.models.stored import check_shapes

if TYPE_CHECKING:
    from slime_embedded.hf.files import Places
    from slime_embedded.models.routing import Routing

T = TypeVar("T")
_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # old checkpoints store the frequencies; they follow from the config


class Norm(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query causal self-attention within each sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, dim
        self.q_proj = Linear(hidden, config.num_heads * dim, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, config.num_kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, config.num_kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * dim, hidden, bias=config.o_bias)
        self.q_norm = Norm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = Norm(dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], layout: PackedLayout, kept_only: bool
    ) -> torch.Tensor:
        """[T, hidden] -> [T or kept rows, hidden]."""
        q = self.q_proj(x).view(-1, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x)
        q, k = self.rotated(q, k, *rope)
        attended = attend(q, k, v, layout, kept_only)
        result: torch.Tensor = self.o_proj(self._padded(q, k, v, layout, kept_only) if attended is None else attended)
        return result

    def rotated(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [T, heads, head_dim], normed where the family does so, and rotated."""
        if self.q_norm is None or self.k_norm is None:
            return rotate(q, cos, sin), rotate(k, cos, sin)
        norms = ((norm.weight, norm.eps) for norm in (self.q_norm, self.k_norm))
        return rotate(q, cos, sin, *next(norms)), rotate(k, cos, sin, *next(norms))

    def _padded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, kept_only: bool
    ) -> torch.Tensor:
        """`attend` by torch, whose attention takes sequences of one length."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        groups = zip(*map(layout.split, (q.flatten(1), k.flatten(1), v), heads), strict=True)
        grouped = self.num_heads != self.num_kv_heads
        outputs = [
            functional.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=grouped) for a, b, c in groups
        ]
        return layout.join(outputs, kept_only)


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward block or a mixture of experts, each on the normed residual stream."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.self_attn = Attention(config)
        experts, hidden = config.experts_of(number), config.hidden_size
        self.mlp: FeedForward | MixtureOfExperts = (
            FeedForward(hidden, config.intermediate_size, config.mlp_bias)
            if experts is None
            else MixtureOfExperts(hidden, experts)
        )
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        layout: PackedLayout,
        kept_only: bool,
        routing: Routing | None = None,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], or the rows `layout` keeps: past the last attention no row needs another."""
        attended = self.self_attn(self.input_layernorm(x), rope, layout, kept_only)
        rows = None
        if kept_only and layout.keep is not None:
            x, rows = layout.keep(x), layout.keep.index
        x = x + attended
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            changed = self.mlp(normed, None if routing is None else routing.of_layer(self.number, rows))
        else:
            changed = self.mlp(normed)
        result: torch.Tensor = x + changed
        return result


class DecoderStack(nn.Module):
    """Embedding, layers and final norm: what HF calls `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Not `nn.Embedding(...)`: drawing its random start on the meta device imports torch._dynamo, which takes longer
        # than building any model that fits on a small machine.
        empty = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(empty, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model over packed sequences.

    Args:
        config: The architecture.
        recompute: Keep only each layer's input for the backward pass and run the layer again there.
    """

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.places: Places | None = None
        """Places of the files' tensors in the parameters; None: files have the parameters' names."""
        self.model = DecoderStack(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        device: torch.device | str = "cpu",
        *,
        recompute: bool = False,
        origin: str = "the weights given",
    ) -> Decoder:
        """Build the module around float32 copies of `weights`, without initialising it first.

        Raises:
            CheckpointError: A tensor is missing, unknown, or of another shape; all are listed with `origin`.
        """
        with torch.device("meta"):
            decoder = cls(config, recompute=recompute)
        expected = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            tied_head = config.tie_word_embeddings and name == "lm_head.weight"
            if not (tied_head or name.endswith(_IGNORED_SUFFIX)):
                found[name] = torch.empty(tensor.shape, device=device, dtype=torch.float32).copy_(tensor)
        check_shapes(expected, {name: tuple(t.shape) for name, t in found.items()}, origin)
        decoder.load_state_dict(found, assign=True)
        return decoder

    @property
    def head_weight(self) -> torch.Tensor:
        """[vocab, hidden] of the output layer: the embedding itself when tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden(
        self,
        token_ids: torch.Tensor,
        lengths: Sequence[int],
        *,
        rows: np.ndarray | None = None,
        same: np.ndarray | None = None,
        routing: Routing | None = None,
    ) -> torch.Tensor:
        """Final hidden states, after the last norm.

        Args:
            token_ids: [T] int64, sequences laid end to end.
            lengths: Tokens of each sequence; they sum to T.
            rows: [R] distinct rows wanted, in the order wanted; None means all T. The others skip what they can.
            same: [T] the first token of which each one is a copy with the same past, itself for the first; that one's
                row is computed and none of the copies'. Only with `rows`.
            routing: Experts to use, and a place to note those used; without, the routers choose.

        Returns:
            [R or T, hidden].
        """
        device = token_ids.device
        layout = PackedLayout.build(lengths, device, rows, same)
        assert sum(lengths) == len(token_ids), "lengths must sum to the number of tokens"
        rope = rope_cos_sin(self.config, layout.positions, device)
        x = self.model.embed_tokens(token_ids if layout.computed is None else token_ids[layout.computed])
        last = len(self.model.layers) - 1
        again = self.recompute and torch.is_grad_enabled()
        for i, layer in enumerate(self.model.layers):
            run = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False) if again else layer
            x = run(x, rope, layout, i == last and rows is not None, routing)
        result: torch.Tensor = self.model.norm(x)
        return result if layout.repeat is None else layout.repeat(result)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab]."""
        return functional.linear(hidden, self.head_weight)

    def log_probs(self, hidden: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs and entropy of `hidden` [R, hidden]; `how` has parameters of `token_log_probs`."""
        return token_log_probs(hidden, self.head_weight, **how)

    def through(self, head: Callable[[torch.Tensor], T], *inputs: Any, **keywords: Any) -> T:
        """Return `head` of the hidden states, both in one forward pass, for which a sharded model gathers weights."""
        return head(self.hidden(*inputs, **keywords))

    def forward(self, token_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """[T] ids -> [T, vocab] float32 logits. For checks and tiny models: training goes through `through`."""
        return self.logits(self.hidden(token_ids, lengths)).float()


def init_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights under HF names, initialised as HF does.

    Matrices and embeddings are normal with standard deviation `config.initializer_range`, norms are ones, biases
    zeros. The same seed gives the same tensors; the global random state is not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(config).named_parameters()}
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            weights[name] = torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)
        else:
            weights[name] = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    return weights
