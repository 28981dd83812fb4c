"""Stage 8: one rank's shaped rewards, log-probs and values -> advantages and returns, through the estimator.

Called by the learner, once per rollout, on every rank (whitening talks to the others). The KL here is between the
policy at the start of the update and the reference, and reaches the reward only through estimators that use it; the KL
in the loss is another term (`learning/loss.py`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from slime_core.errors import TrainError
from slime_core.learning.tensors import Column, TrainTensors
from slime_core.ops.masking import AllReduce, masked, masked_whiten
from slime_core.ops.ratios import kl_estimate
from slime_core.protocols import AdvantageEstimator, AdvantageInputs, Args
from slime_core.sample import TrainBatch

_AS_THEY_ARE = ("loss_masks", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "values")


def compute_advantages(
    args: Args,
    batch: TrainBatch,
    tensors: TrainTensors,
    estimator: AdvantageEstimator,
    all_reduce: AllReduce,
    kept: Column | None = None,
) -> TrainTensors:
    """Fill in `kl`, `advantages` and `returns`, and with `use_opd` also `opd_reverse_kl`.

    Distillation (Agarwal et al., 2023; as a per-token reward: Thinking Machines, "On-Policy Distillation", 2025) goes
    on top of any estimator: A_t -= opd_kl_coef * (log p_old - log p_teacher), before whitening.

    Args:
        args: With `kl_coef` the KL is estimated (`kl_loss_type`), else it is zero; `normalize_advantages` whitens over
            all ranks.
        batch: The rank's local batch.
        tensors: Its columns.
        estimator: The algorithm.
        all_reduce: Sum over data-parallel ranks.
        kept: The loss masks without what a correction rejects, which whitening leaves out; None: nothing is rejected.

    Raises:
        TrainError: The estimator returned something of the wrong shape or not finite.
    """
    kl = _kl(args, tensors)
    device = tensors.loss_masks[0].device if tensors.loss_masks else torch.device("cpu")
    result = estimator.advantages(
        args,
        AdvantageInputs(
            rewards=torch.tensor(batch.rewards, dtype=torch.float32, device=device),
            response_lengths=batch.response_lengths,
            group_indices=batch.group_indices,
            rollout_ids=batch.rollout_ids,
            kl=kl,
            log_probs=tensors.old_log_probs,
            components=batch.components,
            turns=batch.turns,
            turn_rewards=batch.turn_rewards,
            rollout_data=batch.to_rollout_data(),
            **{name: getattr(tensors, name) for name in _AS_THEY_ARE},
        ),
    )
    advantages = _checked("advantages", result.advantages, batch, estimator)
    returns = _checked("returns", result.returns, batch, estimator)
    reverse_kl = _reverse_kl(tensors) if args.use_opd else None
    if reverse_kl is not None:
        advantages = [part - args.opd_kl_coef * gap for part, gap in zip(advantages, reverse_kl)]
    if args.normalize_advantages:
        advantages = _whiten(advantages, tensors.loss_masks if kept is None else kept, all_reduce)
    return replace(tensors, kl=kl, opd_reverse_kl=reverse_kl, advantages=advantages, returns=returns)


def _kl(args: Args, tensors: TrainTensors) -> Column:
    if not args.kl_coef or tensors.ref_log_probs is None or tensors.old_log_probs is None:
        return [torch.zeros_like(mask) for mask in tensors.loss_masks]
    pairs = zip(tensors.old_log_probs, tensors.ref_log_probs)
    return [kl_estimate(old, ref, args.kl_loss_type) for old, ref in pairs]


def _reverse_kl(tensors: TrainTensors) -> Column:
    assert tensors.old_log_probs is not None, "the learner computes old log-probs under use_opd"
    assert tensors.teacher_log_probs is not None, "the learner checks for a teacher under use_opd"
    triples = zip(tensors.old_log_probs, tensors.teacher_log_probs, tensors.loss_masks)
    return [masked(old - teacher, mask) for old, teacher, mask in triples]


def _checked(name: str, parts: Column, batch: TrainBatch, estimator: AdvantageEstimator) -> Column:
    shapes = [tuple(part.shape) for part in parts]
    if shapes != [(length,) for length in batch.response_lengths]:
        raise TrainError(
            f"{type(estimator).__name__}.advantages returned {name} of shapes {shapes[:8]}; expected one tensor per"
            f" sample with response lengths {batch.response_lengths[:8]}"
        )
    return parts


def _whiten(advantages: Column, masks: Column, all_reduce: AllReduce) -> Column:
    # A rank without samples still takes part in the two reductions.
    flat = torch.cat(advantages) if advantages else torch.zeros(0)
    mask = torch.cat(masks) if masks else torch.zeros(0)
    try:
        white = masked_whiten(flat, mask, all_reduce)
    except ValueError:  # nothing is left on any rank, so that no advantage counts
        return advantages
    return list(torch.split(white, [len(part) for part in advantages]))
