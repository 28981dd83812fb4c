"""Log-probs and entropies of a vocabulary that may be split over a process group, with THUDM/slime's keep mask.

For `slime.utils.ppo_utils`, whose callers may bring `log_prob_keep_mask` or a tensor-parallel group; slime's own
trainers have one process per vocabulary and use `slime_core.ops`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist


def vocabulary_group(given: Any) -> Any:
    """Return the group that the vocabulary is split over, or None.

    As in THUDM/slime, None means the default group; in slime's own trainers that one holds copies of the model.
    """
    if given is None and dist.is_initialized() and "slime_embedded.trainer.parallel" not in sys.modules:
        return dist.group.WORLD
    return given


class SplitLogProbs(torch.autograd.Function):
    """[R, V / ranks] logits and [R] ids -> [R, 1] log-probs and [R] entropies, with gradients for this rank's logits.

    log p(y) = z_y - log sum_kept exp z, where a masked target stays in; H = log sum exp z - sum p z, over all entries.
    Both sums go over the ranks, like those of Megatron's vocabulary-parallel cross entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, keep: torch.Tensor | None, group: Any,
        with_entropy: bool, with_entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return both; the entropies are empty without `with_entropy`."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        rows, width = torch.arange(len(logits), device=logits.device), logits.shape[-1]
        local = tokens - width * (0 if group is None else dist.get_rank(group))
        mine = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        kept = logits if keep is None else logits.masked_fill(~keep, float("-inf"))
        if keep is not None:
            kept[rows[mine], local[mine]] = logits[rows[mine], local[mine]]
        shifted, _, total, softmax = _softmax(kept, group)
        target = _reduced(shifted[rows, local].masked_fill(~mine, 0.0)[:, None], group)
        entropy, probs, mean = logits.new_empty(0), None, None
        if with_entropy:
            _, top, sums, probs = (shifted, *_softmax(logits, group)[1:])
            mean = _reduced((probs * logits).sum(-1, keepdim=True), group)
            entropy = (top + sums.log() - mean).squeeze(-1)
        if not (with_entropy and with_entropy_grad):
            ctx.mark_non_differentiable(entropy)
            probs = None
        ctx.save_for_backward(rows[mine], local[mine], softmax, probs, mean, logits if probs is not None else None)
        return target - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, log_prob_grad: torch.Tensor, entropy_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return d/dz: (1[y] - softmax) for log-probs, -p (z - sum p z) for entropies."""
        rows, local, softmax, probs, mean, logits = ctx.saved_tensors
        grad = -softmax
        grad[rows, local] += 1.0
        grad = grad * log_prob_grad
        if probs is not None:
            grad = grad + probs * (mean - logits) * entropy_grad[:, None]
        return grad, None, None, None, None, None


def _softmax(logits: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits minus their maximum, the maximum, the sum of exponentials and the softmax."""
    top = _reduced(logits.max(-1, keepdim=True).values, group, dist.ReduceOp.MAX)
    shifted = logits - top
    exponentials = shifted.exp()
    total = _reduced(exponentials.sum(-1, keepdim=True), group)
    return shifted, top, total, exponentials / total


def _reduced(values: torch.Tensor, group: Any, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, operation, group)
    return values
