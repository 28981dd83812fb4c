"""`slime.utils.ppo_utils`: the formulas of losses and returns under THUDM/slime's names, over `slime_core.ops`.

One process holds the whole sequence; log-probs and entropies alone take a vocabulary that is split over processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from slime_estimators import returns as scan
from slime_estimators.cispo import cispo_surrogate

from slime import _missing
from slime._log_probs import SplitLogProbs, vocabulary_group
from slime_core import ops


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T] KL estimate "k1", "k2", "k3" or "low_var_kl", times `importance_ratio` where one is given.

    `slime_core.ops.kl_estimate`. Raises ConfigError for another kind.
    """
    log_ratio = None if importance_ratio is None else torch.log(importance_ratio)
    return ops.kl_estimate(log_probs, log_probs_base, kl_loss_type, importance_log_ratio=log_ratio)


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] PPO's clipped loss and the clip indicator; `ppo_kl` is old minus new (`slime_core.ops.clipped_surrogate`)."""
    return ops.clipped_surrogate(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c)


def compute_cispo_loss(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] CISPO's loss and the clip indicator (`slime_estimators.cispo`)."""
    return cispo_surrogate(ppo_kl, log_probs, advantages, eps_clip, eps_clip_high)


def compute_gspo_kl(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    local_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """[T] each sample's masked mean of old minus new, repeated over its tokens (`slime_core.ops.sequence_kl`).

    `local_log_probs` are those of this process, which are all of them.
    """
    lengths = [len(part) for part in local_log_probs]
    return ops.sequence_kl(
        torch.cat(list(full_log_probs)), torch.cat(list(full_old_log_probs)), _cat(loss_masks), lengths
    )


def compute_opsm_mask(
    args: Any,
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    advantages: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] 1 on tokens to keep, and the sum over samples of the share left out, by `args.opsm_delta`.

    `slime_core.ops.off_policy_sequences`.
    """
    mask, lengths = _cat(loss_masks), [len(part) for part in loss_masks]
    dropped = ops.off_policy_sequences(
        torch.cat(list(full_log_probs)), torch.cat(list(full_old_log_probs)), torch.cat(list(advantages)), mask,
        lengths, args.opsm_delta,
    )  # fmt: skip
    share = ops.segment_sums(dropped, lengths) / ops.segment_sums(mask, lengths).clamp(min=1)
    return 1 - dropped, share.sum()


def compute_log_probs(logits: torch.Tensor, tokens: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    """[R, V] logits (as they are: divide by the temperature before) and [R] ids -> [R, 1] log-probs."""
    return calculate_log_probs_and_entropy(logits, tokens, process_group)[0]


def compute_entropy_from_logits(logits: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    """[R, V] logits -> [R] entropies in nats, differentiable."""
    tokens = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    entropy = calculate_log_probs_and_entropy(logits, tokens, process_group, with_entropy=True)[1]
    assert entropy is not None
    return entropy


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: Any = None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: torch.Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[R, 1] log-probs and [R] entropies (or None).

    Args:
        logits: [R, V], or this rank's part of V.
        tokens: [R] ids.
        tp_group: Process group that the vocabulary is split over; see `vocabulary_group` for None.
        with_entropy: Return entropies as well.
        chunk_size: Rows at a time; all at once for a number below 1.
        log_prob_keep_mask: [R, V] entries that the log-probs are normalised over; the row's token always is.
        with_entropy_grad: False detaches the entropies.
    """
    if not len(logits):
        return logits.new_zeros(0), logits.new_zeros(0) if with_entropy else None
    group = vocabulary_group(tp_group)
    parts = [
        SplitLogProbs.apply(rows, ids, keep, group, with_entropy, with_entropy_grad)  # type: ignore[no-untyped-call]
        for rows, ids, keep in _chunks(chunk_size, logits, tokens, log_prob_keep_mask)
    ]
    log_probs, entropies = (torch.cat(column) for column in zip(*parts))
    return log_probs, entropies if with_entropy else None


def _chunks(size: int, *columns: torch.Tensor | None) -> Iterable[tuple[Any, ...]]:
    number = -(-len(columns[0]) // size) if size > 0 else 1  # type: ignore[arg-type]
    return zip(*([None] * number if column is None else column.chunk(number) for column in columns), strict=True)


def get_grpo_returns(rewards: torch.Tensor | Sequence[float], kl: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each sample's reward at every token, in the shapes of `kl`."""
    return [torch.full_like(part, float(reward)) for reward, part in zip(rewards, kl, strict=True)]


def get_reinforce_plus_plus_returns(
    rewards: torch.Tensor | Sequence[float],
    kl: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[torch.Tensor]:
    """REINFORCE++ (Hu, 2025): discounted returns of -kl_coef * KL, with the reward at the last unmasked token.

    A response without unmasked tokens has zeros, where THUDM/slime stops. The lengths are those of `kl`.
    """
    parts = [
        scan.token_rewards(float(reward), part, mask.to(part.dtype), kl_coef)
        for reward, part, mask in zip(rewards, kl, loss_masks, strict=True)
    ]
    return [scan.discounted_returns(part[None], gamma)[0] for part in parts]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: torch.Tensor | Sequence[float],
    kl: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    kl_coef: float,
) -> list[torch.Tensor]:
    """Reward (minus the group's mean already) - kl_coef * KL at every token."""
    return [float(reward) - kl_coef * part for reward, part in zip(rewards, kl, strict=True)]


def vanilla_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] generalised advantages and returns (`slime_core.ops.gae`)."""
    return scan.gae(rewards, values, gamma, lambd)


def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the chunk length of the scan."""
    return scan.gae(rewards, values, gamma, lambd, chunk_size)


def chunked_discounted_returns(rewards: torch.Tensor, discount: float, chunk_size: int = 128) -> torch.Tensor:
    """[B, T] returns R_t = r_t + discount * R_{t+1} (`slime_core.ops.discounted_returns`)."""
    return scan.discounted_returns(rewards, discount, chunk_size)


def get_advantages_and_returns(
    total_len: int, response_len: int, values: torch.Tensor, rewards: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE of one response, [response_len] each, without gradient."""
    advantages, returns = scan.gae(rewards[None].detach(), values[None].detach(), gamma, lambd)
    return advantages[0], returns[0]


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[torch.Tensor],
    rewards_list: Sequence[torch.Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """GAE of several responses, without gradient; both values of `chunked` compute the same."""
    padded = [scan.pad_right([part.detach() for part in column]) for column in (rewards_list, values_list)]
    advantages, returns = scan.gae(padded[0], padded[1], gamma, lambd)
    return scan.unpad(advantages, response_lengths), scan.unpad(returns, response_lengths)


def _cat(masks: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(masks)).float()


__all__ = [
    "calculate_log_probs_and_entropy",
    "chunked_discounted_returns",
    "chunked_gae",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_entropy_from_logits",
    "compute_gspo_kl",
    "compute_log_probs",
    "compute_opsm_mask",
    "compute_policy_loss",
    "get_advantages_and_returns",
    "get_advantages_and_returns_batch",
    "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
    "vanilla_gae",
]
__getattr__ = _missing.names(__name__)
