"""The mathematics of RL post-training on plain tensors; public to plugins."""

from __future__ import annotations

from slime_core.ops.corrections import interpolated_log_probs, mismatch_metrics, off_policy_sequences
from slime_core.ops.groups import group_members, group_normalize
from slime_core.ops.kl import kl_estimate
from slime_core.ops.logprobs import SamplingMask, log_probs_from_logits, response_log_probs, token_log_probs
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
from slime_core.ops.returns import (
    discounted_returns,
    gae,
    masked_gae,
    pad_right,
    reverse_scan,
    token_rewards,
    unpad,
)
from slime_core.ops.surrogate import cispo_surrogate, clipped_surrogate, clipped_value_loss

__all__ = [
    "SamplingMask",
    "cispo_surrogate",
    "clipped_surrogate",
    "clipped_value_loss",
    "discounted_returns",
    "expand_to_tokens",
    "gae",
    "group_members",
    "group_normalize",
    "icepop_weight",
    "importance_ratio",
    "interpolated_log_probs",
    "kl_estimate",
    "log_probs_from_logits",
    "masked",
    "masked_gae",
    "masked_mean",
    "masked_whiten",
    "mismatch_metrics",
    "off_policy_sequences",
    "pad_right",
    "per_rollout_weights",
    "per_sample_weights",
    "per_token_weights",
    "ratio_from_kl",
    "response_log_probs",
    "reverse_scan",
    "segment_means",
    "segment_sums",
    "sequence_kl",
    "token_kl",
    "token_log_probs",
    "token_rewards",
    "truncated_weight",
    "unpad",
    "weighted_sum",
]
