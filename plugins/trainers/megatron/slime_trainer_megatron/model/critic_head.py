"""The critic's output layer: one value per token instead of logits.

Put on the last pipeline stage by `model.py`. It takes the place of `ColumnParallelLinear` as `GPTModel.output_layer`
and is called like it. It is the same on all tensor-parallel ranks, and a fresh one is zero, not random, as in the
embedded trainer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class ValueHead(nn.Module):
    """`weight` [1, hidden] and `bias` [1].

    Args:
        config: The `TransformerConfig`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel: bool = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            # Each tensor-parallel rank then sees a part of the tokens, so the parts' gradients are summed.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """[S, B, hidden], or this rank's part of S under sequence parallelism -> [S, B, 1] float32, and no bias."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        values = functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # Every rank computes the same loss of the whole, so the gradient of a part is a slice, not a sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
