"""`slime.backends.megatron_utils.cp_utils`: what custom losses and corrections use under context parallelism.

slime_core gives a user's function whole responses on every context-parallel rank
(`trainers/megatron/step/context_parallel.py`), where THUDM/slime gives it the rank's part. So there is nothing to
gather and nothing to cut: a function that gathers, computes and cuts comes to the same numbers, whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slime import _missing
from slime_core import ops


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[torch.Tensor] | Sequence[int] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """[R] per-token values -> the sum over samples of their masked means, a scalar.

    What it gives is not yet divided by the step's rollouts; the `sum_of_sample_mean` that a custom loss is called with
    is, so use that one for the loss.

    Args:
        total_lengths: Unused; THUDM/slime's.
        response_lengths: [n].
        loss_masks: [n] tensors of [response_length].
        sample_denoms: [n] what each sample's sum is divided by (the masked tokens of its whole rollout); by default
            its own masked tokens.
        calculate_per_token_loss: The plain sum over masked tokens instead.
    """
    mask = torch.cat(list(loss_masks))
    mask = mask if mask.is_floating_point() else mask.float()
    lengths = list(response_lengths)
    if calculate_per_token_loss:
        weights = mask
    else:
        sums = ops.segment_sums(mask, lengths)
        if sample_denoms is not None:
            sums = torch.tensor([float(d) for d in sample_denoms], dtype=mask.dtype, device=mask.device)
        weights = mask / ops.expand_to_tokens(sums.clamp(min=1), lengths)
    return lambda values: ops.weighted_sum(values, weights.to(values.device))


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """The tensor, which holds the whole response already: [response_length, ...].

    Raises:
        ValueError: It has another length; only a part of a response would, and none is handed out here.
    """
    _check_whole("all_gather_with_cp", tensor, total_length, response_length)
    return tensor


def slice_log_prob_with_cp(
    log_prob: list[float] | torch.Tensor, total_length: int, response_length: int
) -> list[float] | torch.Tensor:
    """The log-probs, whole as they are: this rank trains with whole responses. Raises ValueError for another length."""
    _check_whole("slice_log_prob_with_cp", log_prob, total_length, response_length)
    return log_prob


def _check_whole(function: str, values: list[float] | torch.Tensor, total_length: int, response_length: int) -> None:
    if not len(values) == int(response_length) <= int(total_length):
        raise ValueError(
            f"{function}: {len(values)} entries for a response of {int(response_length)} in {int(total_length)} tokens;"
            " every context-parallel rank has whole responses here"
        )


__all__ = ["all_gather_with_cp", "get_sum_of_sample_mean", "slice_log_prob_with_cp"]
__getattr__ = _missing.names(__name__)
