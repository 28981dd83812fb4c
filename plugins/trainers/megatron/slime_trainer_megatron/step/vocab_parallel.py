"""Log-probs of given tokens, and entropy, from logits whose vocabulary is split over tensor-parallel ranks.

Called by `forward.py` on the last pipeline stage; every rank returns the same numbers. Between ranks go only vectors
of one or a few numbers per row (their maximum, then their sums). In memory: the logits [R, V/tp] in the model's dtype
are there already; rows are taken a chunk at a time, so beside them there are a few float32 buffers of
[chunk, V/tp] in forward, and in backward the same and one gradient like the logits (none with `overwrite`, and no
buffers either where the logits are float32 and entropy is not asked for). Nothing of [R, V] and no float32 copy of
the whole logits ever exists.

With z = logits / temperature over the whole vocabulary: log p = z[target] - logsumexp(z), H = -sum p log p, and d log p
/ dz_j = [j = target] - p_j,  dH / dz_j = -p_j (log p_j + H). Columns of the padded vocabulary
(`--make-vocab-size-divisible-by`) are no tokens; they take no part and get gradient 0. Nor do those that a
`SamplingMask` leaves out of a row; a rank that holds none of a row's tokens adds nothing to its sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from slime_embedded.models.logprobs import CHUNK_ELEMENTS, SamplingMask
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class VocabularyPart:
    """A rank's columns: `[start, start + columns)` of the padded vocabulary."""

    start: int
    columns: int
    """Number of tokens among the columns, without the padding after them."""
    group: Any | None = None
    """Tensor-parallel process group; None for a single rank."""

    @classmethod
    def of_rank(cls, rank: int, width: int, vocab_size: int, group: Any | None = None) -> VocabularyPart:
        """Return the part of rank `rank` if every rank has `width` columns and the vocabulary `vocab_size` tokens."""
        start = rank * width
        return cls(start, min(max(vocab_size - start, 0), width), group)

    def reduce_(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """All-reduce the tensor over the group, in place."""
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


def vocab_parallel_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    part: VocabularyPart,
    *,
    temperature: float = 1.0,
    chunk_size: int = -1,
    with_entropy: bool = False,
    overwrite: bool = False,
    mask: SamplingMask | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs of `targets` under softmax(logits / temperature), and its entropy.

    Args:
        logits: [R, V/tp] of this rank, in any float dtype.
        targets: [R] int64 token ids of the whole vocabulary, the same on every rank.
        part: Which columns these are.
        temperature: Sampling temperature, > 0.
        chunk_size: Rows whose float32 copy exists at a time; below 1 it is chosen by `CHUNK_ELEMENTS`.
        with_entropy: Also return the entropy in nats, differentiable.
        overwrite: In backward, write the gradient over the logits; for logits that nothing else reads.
        mask: The tokens of the whole vocabulary that each target was sampled among; None: all.

    Returns:
        log_probs [R] and entropy [R] or None, in float32 (float64 for float64 logits).
    """
    assert temperature > 0
    assert logits.shape[0] == targets.shape[0]
    rows = chunk_size if chunk_size > 0 else default_rows(logits)
    log_probs, entropy = _VocabParallel.apply(  # type: ignore[no-untyped-call]
        logits, targets, part, temperature, rows, with_entropy, overwrite, mask
    )
    return log_probs, entropy if with_entropy else None


def default_rows(logits: torch.Tensor) -> int:
    """Return the rows of a chunk by `CHUNK_ELEMENTS`."""
    elements = CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS["cpu"])
    return max(1, elements // max(logits.shape[1], 1))


def _slices(total: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, total)) for start in range(0, total, rows))


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        part: VocabularyPart,
        temperature: float,
        rows: int,
        with_entropy: bool,
        overwrite: bool,
        mask: SamplingMask | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        own = logits[:, : part.columns]
        top = _row_maxima(own, dtype, targets, part, rows, mask).div_(temperature)
        part.reduce_(top, dist.ReduceOp.MAX)
        column, mine = _own_column(targets, part)
        # Per row: sum of e^(z - max), the target's z - max (0 on ranks without it), and sum of e^(z - max) (z - max).
        sums = torch.zeros((3 if with_entropy else 2, targets.shape[0]), dtype=dtype, device=logits.device)
        for chunk in _slices(targets.shape[0], rows) if part.columns else ():
            z = _scaled_(own[chunk].to(dtype, copy=True), temperature)
            shifted = (z if mask is None else mask.apply_(z, targets, chunk, part.start)).sub_(top[chunk, None])
            sums[1, chunk] = shifted.gather(-1, column[chunk, None]).squeeze(-1).where(mine[chunk], 0)
            weights = shifted.exp() if with_entropy else shifted.exp_()
            sums[0, chunk] = weights.sum(-1)
            if with_entropy:
                # A logit of -inf has weight 0 and must add 0, not 0 * -inf.
                sums[2, chunk] = weights.mul_(shifted.clamp_(min=torch.finfo(dtype).min)).sum(-1)
        part.reduce_(sums, dist.ReduceOp.SUM)
        log_total = sums[0].log()
        log_probs = sums[1] - log_total
        entropy = log_total - sums[2] / sums[0] if with_entropy else log_probs.new_empty(0)
        ctx.mask = mask
        ctx.save_for_backward(logits, targets, column, mine, top.add_(log_total), entropy)
        ctx.set_materialize_grads(False)
        ctx.part, ctx.temperature, ctx.rows, ctx.overwrite = part, temperature, rows, overwrite
        ctx.with_entropy = with_entropy
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_log_probs: torch.Tensor | None, for_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        logits, targets, column, mine, norm, entropy = ctx.saved_tensors
        if not ctx.with_entropy:
            for_entropy = None
        if for_log_probs is None and for_entropy is None:
            return (None,) * 8
        columns = ctx.part.columns
        # d z / d logits, folded into the factors with one number per row.
        for_log_probs, for_entropy = (None if g is None else g / ctx.temperature for g in (for_log_probs, for_entropy))
        out = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        copied = not ctx.overwrite or logits.dtype != norm.dtype
        for chunk in _slices(column.shape[0], ctx.rows) if columns else ():
            log_p = _scaled_(logits.detach()[chunk, :columns].to(norm.dtype, copy=copied), ctx.temperature)
            if ctx.mask is not None:
                ctx.mask.apply_(log_p, targets, chunk, ctx.part.start)
            log_p.sub_(norm[chunk, None])
            grad = log_p.exp() if for_entropy is not None else log_p.exp_()
            factor = torch.zeros_like(norm[chunk, None])
            if for_log_probs is not None:
                factor = factor - for_log_probs[chunk, None]
            if for_entropy is not None:
                log_p.clamp_(min=torch.finfo(log_p.dtype).min).add_(entropy[chunk, None])
                factor = log_p.mul_(-for_entropy[chunk, None]).add_(factor)
            grad.mul_(factor)
            if for_log_probs is not None:
                grad.scatter_add_(-1, column[chunk, None], (for_log_probs[chunk] * mine[chunk])[:, None])
            if copied or for_entropy is not None:
                out[chunk, :columns] = grad
        out[:, columns:] = 0
        return out, *(None,) * 7


def _scaled_(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide the logits by the temperature, in place."""
    return logits if temperature == 1 else logits.div_(temperature)


def _row_maxima(
    own: torch.Tensor,
    dtype: torch.dtype,
    targets: torch.Tensor,
    part: VocabularyPart,
    rows: int,
    mask: SamplingMask | None,
) -> torch.Tensor:
    """Return the [R] row maxima; -inf on a rank that has none of a row's tokens."""
    top = torch.full((own.shape[0],), -torch.inf, dtype=dtype, device=own.device)
    if not own.shape[1]:
        return top
    if mask is None:
        return top.copy_(own.detach().amax(-1))
    for chunk in _slices(own.shape[0], rows):
        top[chunk] = mask.apply_(own.detach()[chunk].clone(), targets, chunk, part.start).amax(-1).to(dtype)
    return top


def _own_column(targets: torch.Tensor, part: VocabularyPart) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the [R] columns of the targets on this rank (0 for others), and [R] whether this rank has them."""
    column = targets - part.start
    mine = (column >= 0) & (column < part.columns)
    return torch.where(mine, column, 0), mine
