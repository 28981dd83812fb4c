"""Megatron's latent attention (MLA) with correct gradients under tensor parallelism.

Used in the layer specs of models with `multi_latent_attention`, with and without Transformer Engine. Megatron's own
local spec splits the projections down to the latents over the tensor-parallel ranks and gathers their outputs
(multi_latent_attention.py, `get_query_key_value_tensors`). The heads of every rank then use the rotary part of the key,
but the backward pass of the gather counts only the rank's own heads. Here the projections are whole on every rank, as
with Transformer Engine, and the gradient of the rotary part is summed over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn
from torch.nn import functional

from slime_core.protocols import Args


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc]
    """`MLASelfAttention` whose projections down to the latents are replicated.

    Args:
        latent_norm_eps: Epsilon of the norms on the latents; None is the model's `layernorm_epsilon`.
    """

    def __init__(
        self, config: Any, submodules: Any, *args: Any, latent_norm_eps: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        down = ["linear_kv_down_proj"] if config.q_lora_rank is None else ["linear_q_down_proj", "linear_kv_down_proj"]
        for name in down:
            if isinstance(getattr(self, name), ColumnParallelLinear):
                setattr(self, name, DownProjection(getattr(self, name)))
        if self.pg_collection.tp.size() > 1 and not config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(self._sum_gradient_of_rotary_key)
        if latent_norm_eps is not None:
            # With Transformer Engine the up projections contain the norms, with the epsilon under the same name.
            for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                if hasattr(getattr(self, name, None), "eps"):
                    getattr(self, name).eps = latent_norm_eps

    def _sum_gradient_of_rotary_key(self, module: Any, args: Args, output: Any) -> Any:
        """Sum the gradient of the rotary key, which the heads of every rank use.

        Under sequence parallelism Megatron gathers the key and sums its gradient.
        """
        combined, bias = output
        latent, rotary = combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], -1)
        rotary = _SumGradient.apply(rotary, self.pg_collection.tp)  # type: ignore[no-untyped-call]
        return torch.cat([latent, rotary], -1), bias


class _SumGradient(torch.autograd.Function):
    """The identity, with a gradient that is summed over ranks.

    Megatron's `copy_to_tensor_model_parallel_region` sums a copy of gradients that are not contiguous and returns the
    original (mappings.py `_reduce`), and the gradient of a concatenation's part is not.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class DownProjection(nn.Module):
    """[..., hidden] -> [..., latent], with the whole weight on every rank, in place of a linear split over ranks.

    Under sequence parallelism each rank sees its part of the sequence; Megatron sums the gradients of weights with the
    attribute `sequence_parallel` (finalize_model_grads.py).
    """

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        config, old = replaced.config, replaced.weight
        self.weight = nn.Parameter(old.new_empty(replaced.output_size, replaced.input_size))
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the output and no bias, like Megatron's linear layers."""
        return functional.linear(hidden, self.weight), None
