"""The mathematics of RL post-training on plain tensors; public to plugins."""

from __future__ import annotations

from slime_core.ops.groups import group_normalize
from slime_core.ops.kl import KL_KINDS, kl_estimate
from slime_core.ops.logprobs import log_probs_from_logits, token_log_probs
from slime_core.ops.masking import (
    expand_to_tokens,
    masked,
    masked_mean,
    masked_whiten,
    per_rollout_weights,
    per_sample_weights,
    per_token_weights,
    segment_means,
    segment_sums,
    weighted_sum,
)
from slime_core.ops.ratios import (
    icepop_weight,
    importance_ratio,
    ratio_from_kl,
    sequence_kl,
    token_kl,
    truncated_weight,
)
from slime_core.ops.returns import discounted_returns, gae, pad_right, reverse_scan, unpad
from slime_core.ops.surrogate import cispo_surrogate, clipped_surrogate, clipped_value_loss

__all__ = [
    "KL_KINDS",
    "cispo_surrogate",
    "clipped_surrogate",
    "clipped_value_loss",
    "discounted_returns",
    "expand_to_tokens",
    "gae",
    "group_normalize",
    "icepop_weight",
    "importance_ratio",
    "kl_estimate",
    "log_probs_from_logits",
    "masked",
    "masked_mean",
    "masked_whiten",
    "pad_right",
    "per_rollout_weights",
    "per_sample_weights",
    "per_token_weights",
    "ratio_from_kl",
    "reverse_scan",
    "segment_means",
    "segment_sums",
    "sequence_kl",
    "token_kl",
    "token_log_probs",
    "truncated_weight",
    "unpad",
    "weighted_sum",
]
