"""Reductions: means, whitening, sums and loss reducers over masked response tokens, and the norm of large tensors.

Called by the stages, trainers and estimator plugins. Layout: the response tokens of several samples laid end to end,
[T] with T = sum(lengths). A masked-out position may hold anything, NaN included, and never reaches a result, so every
product with a mask goes through `masked`. On a CPU torch adds up `segment_reduce` and norms in one float32 number and
loses small terms, so neither is called on long float32 tensors elsewhere.

Rewards are reduced by group, in plain Python with exact sums. Groups are formed by `group_index`, never by position:
THUDM/slime reshapes the flat list to (-1, N) and so mixes prompts as soon as a group is uneven.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch

from slime_core.sample import LARGEST_SCORE

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sum over data-parallel ranks."""
_ROW = 4096
"""Elements whose squares are added up in float32."""


def l2_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of the elements of all tensors together, a float64 scalar: rows in float32, their sum in float64.

    torch's own norm of one float32 tensor on a CPU is 1.4% too small at 135M elements.
    """
    parts = [torch.zeros(1, dtype=torch.float64)]
    for tensor in tensors:
        flat = tensor.detach().flatten()
        flat = flat if flat.dtype == torch.float64 else flat.float()
        whole = flat.numel() // _ROW * _ROW
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
        parts += [rows.double(), torch.linalg.vector_norm(flat[whole:])[None].double()]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(parts[1:] or parts))
    return norm


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values * mask`, with 0 where the mask is 0 even if the value is NaN or infinite. Shapes as given."""
    return torch.where(mask != 0, values, torch.zeros_like(values)) * mask


def masked_whiten(
    values: torch.Tensor, mask: torch.Tensor, all_reduce: AllReduce | None = None, eps: float = 1e-8
) -> torch.Tensor:
    """`(x - mean) / sqrt(var + eps)` with mean and unbiased variance of the unmasked entries of all ranks.

    Args:
        values: [T] floats.
        mask: [T] 0 or 1.
        all_reduce: Sums a float64 tensor over ranks; None means one process. Called twice on every rank.
        eps: Added to the variance.

    Returns:
        [T] in the dtype of `values`; 0 where masked.

    Raises:
        ValueError: No entry is unmasked on any rank.
    """
    reduce: AllReduce = all_reduce or (lambda tensor: tensor)
    wide = values.double()
    weights = mask.double()
    count, total = reduce(torch.stack([weights.sum(), masked(wide, weights).sum()])).unbind()
    if count <= 0:
        raise ValueError("cannot whiten: every entry is masked on every rank")
    centred = masked(wide - total / count, weights)
    # A second pass over the deviations: E[x^2] - E[x]^2 cancels when the mean is large.
    squares = reduce(centred.square().sum())
    variance = squares / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + eps)).to(values.dtype)


def segment_sums(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[T] -> [n], the sum over each sample's tokens; differentiable. Empty samples give 0."""
    sizes = torch.tensor(list(lengths), device=values.device, dtype=torch.long)
    if values.numel() == 0:
        return values.new_zeros(len(sizes))
    return torch.segment_reduce(values.double(), "sum", lengths=sizes, initial=0.0).to(values.dtype)


def expand_to_tokens(per_sample: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[n] -> [T], each sample's value repeated over its tokens."""
    sizes = torch.tensor(list(lengths), device=per_sample.device, dtype=torch.long)
    return per_sample.repeat_interleave(sizes, output_size=sum(lengths))


def segment_means(values: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[n] sum(x * mask) / max(sum(mask), 1) of each sample."""
    return segment_sums(masked(values, mask), lengths) / segment_sums(mask, lengths).clamp(min=1)


# -- reducers --------------------------------------------------------------------------------------------
#
# A reducer is a weight per token: the reduced value is the sum of values * weights over every micro-batch of every
# rank. Its denominators are those of the whole step, so no split of the samples can change the result.


def per_token_weights(mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Mean over the step's unmasked tokens: [T] mask / max(num_tokens, 1)."""
    return mask / max(num_tokens, 1)


def per_rollout_weights(
    mask: torch.Tensor, lengths: Sequence[int], rollout_mask_sums: Sequence[int], num_rollouts: int
) -> torch.Tensor:
    """Mean over rollouts of the mean over a rollout's tokens (THUDM/slime's default): [T].

    Args:
        mask: [T] 0 or 1.
        lengths: [n] tokens of each sample.
        rollout_mask_sums: [n] unmasked tokens of all fan-out siblings of each sample, itself included.
        num_rollouts: Rollouts in the optimizer step.
    """
    scale = [1.0 / (max(s, 1) * max(num_rollouts, 1)) for s in rollout_mask_sums]
    return mask * expand_to_tokens(torch.tensor(scale, device=mask.device, dtype=mask.dtype), lengths)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scalar sum of values * weights; a zero weight silences NaN and infinity."""
    return masked(values, weights).sum()


_STD_EPS = 1e-6


def group_normalize(
    rewards: Sequence[float], group_indices: Sequence[int], std: bool, rollout_ids: Sequence[int] | None = None
) -> list[float]:
    """(reward - group mean), divided by (unbiased group deviation + 1e-6) when `std`.

    Fan-out siblings (equal `rollout_ids`) are one member of their group, worth the mean of their rewards, so a
    rollout split into many samples does not outvote the others. A group of one member has no deviation and is
    only centred (0 without siblings).

    Args:
        rewards: [n].
        group_indices: [n] prompt group of each sample.
        std: Divide by the deviation (GRPO); False leaves Dr. GRPO's centred reward.
        rollout_ids: [n]; None means that every sample is its own rollout.

    Returns:
        [n] in the order given.
    """
    values = group_members(rewards, group_indices, rollout_ids)
    means = {group: _mean([*members.values()]) for group, members in values.items()}
    scales = {g: deviation([*m.values()]) + _STD_EPS if std and len(m) > 1 else 1.0 for g, m in values.items()}
    return [(float(r) - means[g]) / scales[g] for r, g in zip(rewards, group_indices)]


def deviation(values: Sequence[float]) -> float:
    """Return the unbiased standard deviation; 0 of one value. Neither sums nor squares of large values overflow."""
    return math.dist(values, [_mean(values)] * len(values)) / math.sqrt(max(len(values) - 1, 1))


def group_members(
    rewards: Sequence[float], group_indices: Sequence[int], rollout_ids: Sequence[int] | None = None
) -> dict[int, dict[int, float]]:
    """Return group -> rollout id -> the member's reward: the mean over its fan-out siblings.

    Every group statistic starts from it. Arguments as in `group_normalize`.
    """
    ids = list(range(len(rewards))) if rollout_ids is None else list(rollout_ids)
    if not len(rewards) == len(group_indices) == len(ids):
        raise ValueError(f"{len(rewards)} rewards, {len(group_indices)} group_indices, {len(ids)} rollout_ids")
    siblings: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reward, group, rollout in zip(rewards, group_indices, ids):
        siblings[group][rollout].append(float(reward))
    return {
        group: {rollout: _mean(values) for rollout, values in members.items()} for group, members in siblings.items()
    }


def _mean(values: Sequence[float]) -> float:
    """Return the mean, without overflow; if all values are equal, exactly that value, whose deviation is then 0."""
    if values.count(values[0]) == len(values):
        return values[0]
    size = max(1.0, *(abs(value) / LARGEST_SCORE for value in values))  # 1, which changes no bit, for usual rewards
    return math.fsum(value / size for value in values) / len(values) * size
