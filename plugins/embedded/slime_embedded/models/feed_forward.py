"""The feed-forward part of a decoder layer: a SwiGLU block, or a mixture of such blocks with a router.

Built by `models/decoder.py`; `models/batch_invariant.py` calls the same modules on tiles of fixed size through
`on_rows`. Parameter names are those of HF hub files (one gate, up and down matrix per expert), which transformers and
SGLang both read. The chosen experts, from the router or from a replay, are used in ascending order of their number, so
that equal choices give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from slime_core.models.config import MoEConfig
from slime_embedded.models.lean_autograd import Linear, swiglu
from slime_embedded.models.packed import RowMap

if TYPE_CHECKING:
    from slime_embedded.models.routing import LayerRouting

OnRows = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]
"""Function that applies a row-wise function to [T, ...] rows."""


class FeedForward(nn.Module):
    """A SwiGLU feed-forward block."""

    def __init__(self, hidden: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        result: torch.Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return result


class MixtureOfExperts(nn.Module):
    """A mixture of experts: each token uses the `experts_per_token` experts with the largest router probability.

    Source: Qwen3-MoE.
    """

    def __init__(self, hidden: int, moe: MoEConfig) -> None:
        super().__init__()
        self.per_token, self.normalizes = moe.experts_per_token, moe.normalize_top_k
        self.gate = nn.Linear(hidden, moe.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(hidden, moe.intermediate_size) for _ in range(moe.num_experts))

    def forward(
        self,
        x: torch.Tensor,
        routing: LayerRouting | None = None,
        on_rows: OnRows = lambda function, rows: function(rows),
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden].

        Args:
            x: The normed residual stream.
            routing: Experts to use instead of the router's choice; it also records the chosen experts. The weights of
                the experts always come from this router, renormalised over the chosen experts if the family does so.
            on_rows: Runs router and experts, for callers that need fixed shapes.
        """
        probabilities = torch.softmax(on_rows(self.gate, x).float(), dim=-1)
        chosen = torch.topk(probabilities.detach(), self.per_token, dim=-1).indices.sort(dim=-1).values
        if routing is not None:
            chosen = routing.choose(chosen)
        weights = probabilities.gather(1, chosen)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        outputs = self._through_experts(x, chosen, on_rows)
        result = outputs[:, 0] * weights[:, :1]
        for k in range(1, self.per_token):
            result = result + outputs[:, k] * weights[:, k : k + 1]
        return result.to(x.dtype)

    def _through_experts(self, x: torch.Tensor, chosen: torch.Tensor, on_rows: OnRows) -> torch.Tensor:
        """Return [T, k, hidden], the output of each chosen expert for each token."""
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        by_expert, by_token = RowMap(order, inverse, None), RowMap(inverse, order, None)
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        repeated = x.unsqueeze(1).expand(-1, self.per_token, -1).reshape(-1, x.shape[1])
        parts = torch.split(by_expert(repeated), counts)
        outputs = [on_rows(expert, part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        return by_token(torch.cat(outputs)).view(-1, self.per_token, x.shape[1])
