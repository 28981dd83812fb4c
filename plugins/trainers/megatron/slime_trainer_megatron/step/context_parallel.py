"""Per-token results of the context-parallel ranks -> whole responses, in order, on each of them; differentiable.

Called by `forward.py` on the last pipeline stage, so that a loss always sees whole responses (ratios of a sequence,
means over samples) and is the same number on every context-parallel rank. Backward does not sum over ranks. Every rank
differentiates the same loss with respect to its own tokens; the data- and context-parallel sum of parameter gradients
adds these parts up, once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def gather_places(local: torch.Tensor, places: torch.Tensor, total: int, group: Any | None) -> torch.Tensor:
    """Put every rank's entries where they belong.

    Args:
        local: [n, ...] entries of this rank.
        places: [n] int64 in [0, total): where they go. Over all ranks each place occurs once.
        total: Entries over all ranks.
        group: Context-parallel process group; None for a single rank.

    Returns:
        [total, ...], the same on every rank; its gradient goes to the entries of this rank alone.
    """
    if group is None or dist.get_world_size(group) == 1:
        # One rank has its entries in order: nothing to move.
        assert local.shape[0] == total
        return local
    whole: torch.Tensor = _Gather.apply(local, places, total, group)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, places: torch.Tensor, total: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(places)
        # A sum in which all but one term are zero: exact, and ranks may hold different numbers of entries.
        whole = local.new_zeros((total, *local.shape[1:]))
        whole[places] = local
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None
