"""The mathematics of RL post-training on plain tensors; public to plugins, and loaded lazily (PEP 562)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.lazy import Exports

if TYPE_CHECKING:
    from slime_core.ops.masking import deviation as deviation
    from slime_core.ops.masking import expand_to_tokens as expand_to_tokens
    from slime_core.ops.masking import group_members as group_members
    from slime_core.ops.masking import group_normalize as group_normalize
    from slime_core.ops.masking import l2_norm as l2_norm
    from slime_core.ops.masking import masked as masked
    from slime_core.ops.masking import masked_whiten as masked_whiten
    from slime_core.ops.masking import per_rollout_weights as per_rollout_weights
    from slime_core.ops.masking import per_token_weights as per_token_weights
    from slime_core.ops.masking import segment_means as segment_means
    from slime_core.ops.masking import segment_sums as segment_sums
    from slime_core.ops.masking import weighted_sum as weighted_sum
    from slime_core.ops.ratios import clipped_surrogate as clipped_surrogate
    from slime_core.ops.ratios import clipped_value_loss as clipped_value_loss
    from slime_core.ops.ratios import importance_ratio as importance_ratio
    from slime_core.ops.ratios import interpolated_log_probs as interpolated_log_probs
    from slime_core.ops.ratios import kl_estimate as kl_estimate
    from slime_core.ops.ratios import mismatch_metrics as mismatch_metrics
    from slime_core.ops.ratios import off_policy_sequences as off_policy_sequences
    from slime_core.ops.ratios import ratio_from_kl as ratio_from_kl
    from slime_core.ops.ratios import sequence_kl as sequence_kl
    from slime_core.ops.ratios import token_kl as token_kl

_EXPORTS = Exports(
    __name__,
    __file__,
    provided=(
        *("cispo_surrogate", "icepop_weight", "truncated_weight"),
        *("SamplingMask", "log_probs_from_logits", "response_log_probs", "token_log_probs"),
        *("discounted_returns", "gae", "masked_gae", "pad_right", "reverse_scan", "token_rewards", "unpad"),
    ),
)
__all__ = [*_EXPORTS.places, *_EXPORTS.provided]


def __getattr__(name: str) -> Any:
    return _EXPORTS.load(name)
