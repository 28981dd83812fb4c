"""The fused tensors after attention in one layer of the embedded engine: a SwiGLU block, or routed experts.

`weights.py` fills them under HF names, `model_runner.py` calls them. Gate and up projections are one matrix. What a
reader would get wrong: tokens are grouped by expert, so an expert's product has as many rows as tokens chose it, and
last bits differ with the batch; `--true-on-policy-mode` uses `invariant_runner.py` instead.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from slime_core.engines.embedded.linear import Linear
from slime_core.models.config import MoEConfig


class FeedForward:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down
        self.inner = down.weight.shape[1]

    @classmethod
    def empty(cls, hidden: int, inner: int, *, bias: bool, device: torch.device, dtype: torch.dtype) -> FeedForward:
        """Contents undefined."""

        def new(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        gate_up = Linear(new(2 * inner, hidden), new(2 * inner) if bias else None)
        return cls(gate_up, Linear(new(hidden, inner), new(hidden) if bias else None))

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; `routed` stays as it is."""
        both = self.gate_up(x)
        return self.down(F.silu(both[:, : self.inner]).mul_(both[:, self.inner :]))

    @property
    def linears(self) -> list[Linear]:
        """To be repacked after a change."""
        return [self.gate_up, self.down]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF names below `mlp.` and views."""
        for name, rows in (("gate", slice(0, self.inner)), ("up", slice(self.inner, None))):
            yield f"{name}_proj.weight", self.gate_up.weight[rows]
            if self.gate_up.bias is not None:
                yield f"{name}_proj.bias", self.gate_up.bias[rows]
        yield "down_proj.weight", self.down.weight
        if self.down.bias is not None:
            yield "down_proj.bias", self.down.bias


class Experts:
    """Router and experts: `models.feed_forward.MixtureOfExperts` without gradients."""

    def __init__(self, hidden: int, moe: MoEConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.moe = moe
        self.router = torch.empty(moe.num_experts, hidden, device=device, dtype=dtype)
        self.experts = [
            FeedForward.empty(hidden, moe.intermediate_size, bias=False, device=device, dtype=dtype)
            for _ in range(moe.num_experts)
        ]

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; the chosen experts go into `routed` [T, k]."""
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

    @property
    def linears(self) -> list[Linear]:
        """To be repacked after a change."""
        return [linear for expert in self.experts for linear in expert.linears]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF names below `mlp.` and views."""
        yield "gate.weight", self.router
        for i, expert in enumerate(self.experts):
            yield from ((f"experts.{i}.{name}", tensor) for name, tensor in expert.tensors())
