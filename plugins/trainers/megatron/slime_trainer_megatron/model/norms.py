"""RMSNorm for Megatron's layers where Transformer Engine is not: the one that shards activations over the sequence.

Put into layer specs by `specs.py`. Megatron's own fallback refuses sequence parallelism (transformer/torch_norm.py);
it needs no more than the mark on the weight that makes `finalize_model_grads` sum its gradient over tensor-parallel
ranks. The arithmetic is that of the embedded trainer, so the two agree.
"""

from __future__ import annotations

from typing import Any

import torch
from slime_embedded.models.lean_autograd import rms_norm
from torch import nn

from slime_core.errors import ConfigError


class RMSNorm(nn.Module):
    """Built by Megatron, which gives these arguments and others that a plain norm has no use for.

    Args:
        config: The `TransformerConfig`.
        hidden_size: Of the last axis.
        eps: Added to the mean square.

    Raises:
        ConfigError: The model has another kind of norm.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ConfigError(
                f"--normalization {config.normalization}: without Transformer Engine only RMSNorm is supported"
            )
        self.eps = eps
        self.zero_centered: bool = config.layernorm_zero_centered_gamma
        """The weight is stored minus one."""
        fill = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(fill(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same."""
        # In float32: next to one, bfloat16 would round most of a weight away.
        weight = self.weight.float() + 1 if self.zero_centered else self.weight
        return rms_norm(x, weight, self.eps)
