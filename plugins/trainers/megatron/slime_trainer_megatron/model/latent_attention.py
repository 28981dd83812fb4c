"""Megatron's latent attention (MLA) with right gradients under tensor parallelism.

Stands in the layer specs of models with `multi_latent_attention`, with and without Transformer Engine. Megatron's own
local spec cuts the projections down to the latents over the tensor-parallel ranks and gathers their outputs
(multi_latent_attention.py, `get_query_key_value_tensors`). The rotary part of the key is then used by every rank's
heads, but the way back through the gather takes only the rank's own heads into account. Here the projections are whole
on every rank, as with Transformer Engine, and the gradient of that part is summed over ranks.
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
        latent_norm_eps: Of the norms on the latents; None is the model's `layernorm_epsilon`.
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
            # With Transformer Engine the norms are in the projections up, which keep the epsilon under the same name.
            for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                if hasattr(getattr(self, name, None), "eps"):
                    getattr(self, name).eps = latent_norm_eps

    def _sum_gradient_of_rotary_key(self, module: Any, args: Args, output: Any) -> Any:
        """Every rank's heads use the one rotary key. Under sequence parallelism Megatron gathers it, and sums there."""
        combined, bias = output
        latent, rotary = combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], -1)
        rotary = _SumGradient.apply(rotary, self.pg_collection.tp)  # type: ignore[no-untyped-call]
        return torch.cat([latent, rotary], -1), bias


class _SumGradient(torch.autograd.Function):
    """The identity; the gradient is the sum over ranks.

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
    """[..., hidden] -> [..., latent], with all of the weight on every rank, in place of a linear cut over ranks.

    Under sequence parallelism each rank sees its part of the sequence; Megatron sums the gradients of
    weights so marked (finalize_model_grads.py).
    """

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        config, old = replaced.config, replaced.weight
        self.weight = nn.Parameter(old.new_empty(replaced.output_size, replaced.input_size))
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As Megatron's linear layers: the output, and no bias."""
        return functional.linear(hidden, self.weight), None
