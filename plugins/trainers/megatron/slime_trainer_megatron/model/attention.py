"""Causal core attention on torch's scaled_dot_product_attention: packed sequences, grouped heads, context parallelism.

`specs.py` puts it into layer specs if Transformer Engine is not installed; Megatron's own `DotProductAttention`
supports neither packed sequences nor context parallelism. Queries, keys and values are already rotated. Under context
parallelism each sequence is cut into `2 * size` chunks, and rank r has chunks r and `2 * size - 1 - r`, so that all
ranks have the same work under a causal mask:

    size 2, one sequence of 8 tokens      rank 0: 0 1 6 7      rank 1: 2 3 4 5
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional

from slime_core.errors import ConfigError


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """The core attention of a layer; Megatron builds it for `SelfAttention` and `MLASelfAttention`.

    Args:
        config: The `TransformerConfig`.
        layer_number: Number of the layer in the whole model, from 1.
        attn_mask_type: Must be causal.
        attention_type: "self".
        softmax_scale: Scale of scores; by default one over the root of the query's head dimension.
        pg_collection: Megatron's groups; by default those of `parallel_state`.

    Raises:
        ConfigError: The configuration requires attention that this class does not compute.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        for flag, value, allowed in (
            ("--window-size", config.window_size, None),
            ("--attention-dropout", config.attention_dropout if attention_dropout is None else attention_dropout, 0),
            ("--softmax-type", config.softmax_type, "vanilla"),
            ("--qk-clip", config.qk_clip, False),
        ):
            if value != allowed:
                raise ConfigError(f"{flag} {value}: needs Transformer Engine; without it only {allowed} is supported")
        assert (attention_type, attn_mask_type) == ("self", AttnMaskType.causal)
        self.softmax_scale = softmax_scale
        group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        self.context_group: Any = group

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [T, heads, dim] packed (with `packed_seq_params`), or [S, B, heads, dim]; this context rank's part.
            key: The same with the number of key-value heads.
            value: The same; its `dim` may be another.
            attention_mask: None, for every sequence is causal.
            attn_mask_type: Causal.
            attention_bias: None.
            packed_seq_params: Where sequences begin, in tokens of all context ranks; padded lengths where given.

        Returns:
            [T, heads * dim of value] packed, [S, B, heads * dim of value] otherwise.
        """
        assert attention_mask is None, "causal sequences need no mask"
        assert attention_bias is None
        packed = packed_seq_params is not None
        lengths = [query.shape[0]]
        if packed:
            assert packed_seq_params.qkv_format == "thd", packed_seq_params.qkv_format
            starts = packed_seq_params.cu_seqlens_q_padded
            starts = packed_seq_params.cu_seqlens_q if starts is None else starts
            lengths = (starts.diff() // self.context_group.size()).tolist()
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        width = value.shape[-1]
        if width < query.shape[-1]:
            # Kernels without a T x T matrix require equal head dimensions; MLA's values have a smaller one.
            value = functional.pad(value, (0, query.shape[-1] - width))
        if self.context_group.size() == 1:
            sequences = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
            outputs = [self._attend(q, k, v, None) for q, k, v in sequences]
        else:
            outputs = self._over_context(query, key, value, lengths)
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        output = output[..., :width].flatten(-2)
        return output.squeeze(1) if packed else output

    def _over_context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]
    ) -> list[torch.Tensor]:
        """Return the outputs of this rank's chunks, in order, computed with the keys and values of all ranks."""
        size, rank = self.context_group.size(), self.context_group.rank()
        both: torch.Tensor = _GatherOverContext.apply(  # type: ignore[no-untyped-call]
            torch.cat((key, value), -1), self.context_group
        )
        outputs, begin = [], 0
        for length in lengths:
            chunk, middle, end = length // 2, begin + length // 2, begin + length
            assert length == 2 * chunk, f"a sequence of {length * size} tokens in {2 * size} chunks"
            # [size, T, B, heads, dim] -> the sequence: first chunks by rank, then second chunks in reverse order.
            ordered = torch.cat((both[:, begin:middle].flatten(0, 1), both[:, middle:end].flip(0).flatten(0, 1)))
            keys, values = torch.split(ordered, [key.shape[-1], value.shape[-1]], -1)
            for place, queries in ((rank, query[begin:middle]), (2 * size - 1 - rank, query[middle:end])):
                seen = (place + 1) * chunk
                mask = torch.ones(chunk, seen, dtype=torch.bool, device=query.device).tril(seen - chunk)
                outputs.append(self._attend(queries, keys[:seen], values[:seen], mask))
            begin = end
        return outputs

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """[S, B, heads, dim] -> the same; causal without a mask."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.permute(2, 0, 1, 3)


class _GatherOverContext(torch.autograd.Function):
    """[T, ...] -> [size, T, ...] of all ranks; the gradient is the sum over ranks of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered.reshape(group.size(), *x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(total, grad.flatten(0, 1).contiguous(), group=ctx.group)
        return total, None
