"""`slime.backends.megatron_utils.loss`: what custom losses and corrections import. Nothing here is Megatron.

A custom loss gets the logits of whole samples, [1, T, V], not divided by the temperature, as in THUDM/slime;
`get_log_probs_and_entropy` divides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slime import _missing
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss
from slime_core import ops

Column = list[torch.Tensor]


class _Answer(tuple[Any, ...]):
    """(empty tensor, columns), which is what newer versions of THUDM/slime return; older code takes `answer["..."]`."""

    @property
    def columns(self) -> dict[str, Column]:
        """The second part."""
        found: dict[str, Column] = super().__getitem__(1)
        return found

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return key in self.columns if isinstance(key, str) else super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The column, or `default`."""
        return self.columns.get(key, default)


def get_responses(
    logits: torch.Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Per sample: [response_length, V] logits that predict its response, over the temperature, and its ids."""
    rows = logits.reshape(-1, logits.shape[-1]) / args.rollout_temperature
    end = 0
    for tokens, total, length in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        end += int(total)
        yield rows[end - length - 1 : end - 1], tokens[len(tokens) - length :]


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
    **kwargs: Any,
) -> Any:
    """Differentiable log-probs of each response, and entropies: `slime_core.ops.response_log_probs`.

    Args:
        logits: [1, T, V] of whole samples.
        args: `rollout_temperature` divides the logits.
        unconcat_tokens: [n] ids, prompt and response.
        total_lengths: [n] of both.
        response_lengths: [n].
        with_entropy: Also "entropy".
        non_loss_data: Unused; THUDM/slime's.
        max_seq_lens: Padding of another layout than this one's: None.

    Returns:
        (empty tensor, {"log_probs": [n tensors], "entropy": [n tensors]}); indexing the pair by a name works as well.

    Raises:
        ValueError: The lengths do not fit, or an option of another layout is set.
    """
    unknown = [name for name, value in {"max_seq_lens": max_seq_lens, **kwargs}.items() if value]
    if unknown:
        raise ValueError(f"get_log_probs_and_entropy: {', '.join(unknown)}: not supported; leave it out")
    if [len(part) for part in unconcat_tokens] != [int(n) for n in total_lengths]:
        raise ValueError("get_log_probs_and_entropy: total_lengths are not the lengths of unconcat_tokens")
    log_probs, entropy = ops.response_log_probs(
        logits, unconcat_tokens, [int(n) for n in response_lengths], args.rollout_temperature, with_entropy=with_entropy
    )
    columns = {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}
    return _Answer((torch.empty(0, device=logits.device), columns))


def vanilla_tis_function(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Column,
    rollout_log_probs: Column,
    loss_masks: Column,
    **kwargs: Any,
) -> tuple[torch.Tensor, Column, dict[str, torch.Tensor]]:
    """Truncated importance sampling: `pg_loss` times trainer / engine, clamped to `--tis-clip-low` and `--tis-clip`.

    The component `tis` computes the same for a whole step. Returns loss, masks as they were, and per-token metrics.
    """
    return _corrected(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, ops.truncated_weight)


def icepop_function(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Column,
    rollout_log_probs: Column,
    loss_masks: Column,
    **kwargs: Any,
) -> tuple[torch.Tensor, Column, dict[str, torch.Tensor]]:
    """IcePop: the same with weight 0 outside the bounds; the component `icepop`."""
    return _corrected(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, ops.icepop_weight)


def _corrected(
    args: Any, pg_loss: torch.Tensor, train: Column, rollout: Column, masks: Column, bound: Any
) -> tuple[torch.Tensor, Column, dict[str, torch.Tensor]]:
    ratio = ops.importance_ratio(torch.cat(list(train)), torch.cat(list(rollout)))
    weights, changed = bound(ratio, args.tis_clip_low, args.tis_clip)
    metrics = {"tis": ratio, "tis_clipfrac": changed, "tis_abs": (ratio - 1).abs()}
    return pg_loss * weights, masks, metrics


__all__ = [
    "compute_approx_kl",
    "compute_policy_loss",
    "get_log_probs_and_entropy",
    "get_responses",
    "get_sum_of_sample_mean",
    "icepop_function",
    "vanilla_tis_function",
]
__getattr__ = _missing.names(__name__)
