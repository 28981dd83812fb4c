"""RMSNorm over all heads of a query or key at once, whose heads are split over tensor-parallel ranks.

`megatron.layer_spec` puts it in the place of `q_layernorm` and `k_layernorm`, where `SelfAttention` gives it the heads
of this rank. The mean square is over the heads of all ranks, so its gradient, too, is the sum of all ranks' gradients;
the weight is split as the heads are.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class FullWidthNorm(MegatronModule):  # type: ignore[misc]
    """[..., heads of this rank, head_dim] -> the same."""

    def __init__(self, config: Any, hidden_size: int, num_heads: int, eps: float) -> None:
        """
        Args:
            config: Megatron's.
            hidden_size: Of one head.
            num_heads: Of the whole model; the tensor-parallel size divides it.
            eps: Added to the mean square.
        """
        super().__init__(config=config)
        self.group = get_tensor_model_parallel_group()
        self.eps = eps
        self.width = num_heads * hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        ones = torch.ones(self.width // self.group.size(), dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(ones)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise; rounding as in the HF model."""
        wide = heads.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        # Summed over ranks on the way there and, for its gradient, on the way back.
        squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        normal = (wide * torch.rsqrt(squares / self.width + self.eps)).to(heads.dtype)
        return self.weight.view(heads.shape[-2:]) * normal

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """For `dist_checkpointing`: the weight is split over tensor-parallel ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=tp_group if tp_group is not None else self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded
