"""An off-policy correction per sequence: gathered over context-parallel ranks, weighed, and cut to the rank's part."""

import torch
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp


def correction(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
):
    weights = []
    for train, engine, mask, total, length in zip(
        train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths
    ):
        train, engine = all_gather_with_cp(train, total, length), all_gather_with_cp(engine, total, length)
        mean = ((train - engine) * mask).sum() / mask.sum().clamp(min=1)  # one weight for the sequence
        whole = mean.exp().clamp(max=args.tis_clip).expand(length)
        weights.append(slice_log_prob_with_cp(whole, total, length))
    weight = torch.cat(weights)
    return pg_loss * weight, loss_masks, {"sequence_weight": weight.detach()}
