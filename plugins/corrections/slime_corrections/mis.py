"""Mismatch importance sampling: weights and rejection for what trainer and engine disagree on, as settings.

The mathematics is `weights.py`; which setting does what: docs/concepts/off-policy.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from slime_core import Args, CorrectionInputs, CorrectionOutputs
from slime_core.errors import ConfigError
from slime_core.ops import mismatch_metrics
from slime_corrections.weights import bounded_weights, importance_at, inside, mean_weight, trust_region, veto

__all__ = ["MismatchImportanceSampling"]


class MismatchImportanceSampling:
    """THUDM/slime's MIS example as settings: weights by level and mode, rejection by its own level and bounds, veto,
    trust region, normalisation over the optimizer step.

    Metrics, prefix `mis_`: those of `slime_core.ops.mismatch_metrics`, the weight before and after its bounds, the
    share of tokens beyond each bound or rejected, and the normaliser.
    """

    reads: ClassVar[tuple[str, ...]] = (
        *("tis_clip", "tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"),
        *("use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound"),
        *("rs_veto_threshold", "rs_trust_region", "rs_tr_threshold"),
    )
    """Settings that it acts on."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.whole_step: bool = args.tis_batch_normalize
        high = args.tis_clip if args.tis_upper_bound is None else args.tis_upper_bound
        low = 1 / high if args.tis_lower_bound is None else args.tis_lower_bound
        self.low, self.high = low, high
        self.rs_low = low if args.rs_lower_bound is None else args.rs_lower_bound
        self.rs_high = high if args.rs_upper_bound is None else args.rs_upper_bound
        _check_bounds("tis", low, high, used=args.tis_mode != "truncate")
        _check_bounds("rs", self.rs_low, self.rs_high, used=args.use_rs)
        if args.rs_trust_region and args.rs_tr_threshold is None:
            raise ConfigError(f"--rs-trust-region {args.rs_trust_region} needs --rs-tr-threshold")
        named = [n for n in ("rs_veto_threshold", "rs_trust_region") if getattr(args, n) is not None]
        if named and not args.use_rs:
            raise ConfigError(f"--{named[0].replace('_', '-')} needs --use-rs")

    def weigh(self, inputs: CorrectionInputs) -> CorrectionOutputs:
        """Weights and mask of one optimizer step."""
        mask, lengths = inputs.loss_mask, inputs.sample_lengths
        log_ratio = inputs.train_log_probs - inputs.rollout_log_probs
        raw = importance_at(log_ratio, mask, lengths, self.args.tis_level)
        weights, kept = bounded_weights(raw, self.args.tis_mode, self.low, self.high)
        # What "mask" leaves out keeps its unbounded weight: one such token would make the mean, and vanish the others.
        counted = mask * kept
        metrics = mismatch_metrics(inputs.train_log_probs, inputs.rollout_log_probs, mask, lengths)
        metrics |= {
            "tis_weight_before_bound": raw,
            "tis_fraction_low": (raw < self.low).to(raw.dtype),
            "tis_fraction_high": (raw > self.high).to(raw.dtype),
            "tis_weight_after_bound": weights,
        }
        if self.args.use_rs:
            accepted, found = self._accepted(log_ratio, mask, lengths)
            kept, metrics = kept * accepted, metrics | found
        if self.args.tis_batch_normalize:
            assert inputs.all_reduce is not None, "refused at start-up: this correction needs the whole step"
            siblings, level = inputs.sibling_counts, self.args.tis_level
            mean = mean_weight(weights, counted, lengths, level, inputs.all_reduce, siblings)
            mean = mean.to(weights.dtype)
            weights = weights / mean
            metrics["batch_norm_factor"] = mean.expand_as(weights)
        metrics["rejected_fraction"] = 1 - kept
        return CorrectionOutputs(weights, mask * kept, {f"mis_{name}": value for name, value in metrics.items()})

    def _accepted(
        self, log_ratio: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        args = self.args
        ratio = importance_at(log_ratio, mask, lengths, args.rs_level)
        accepted = inside(ratio, self.rs_low, self.rs_high)
        metrics = {
            "rs_mask_fraction_low": (ratio < self.rs_low).to(ratio.dtype),
            "rs_mask_fraction_high": (ratio > self.rs_high).to(ratio.dtype),
        }
        if args.rs_veto_threshold is not None:
            spared = veto(log_ratio, mask, lengths, args.rs_veto_threshold)
            accepted, metrics["rs_veto_fraction"] = accepted * spared, 1 - spared
        if args.rs_trust_region is not None:
            assert args.rs_tr_threshold is not None, "checked when this was built"
            near, value = trust_region(log_ratio, mask, lengths, args.rs_trust_region, args.rs_tr_threshold)
            metrics |= {"rs_trust_region_metric": value, "rs_trust_region_reject_fraction": 1 - near}
            accepted = accepted * near
        return accepted, metrics


def _check_bounds(prefix: str, low: float, high: float, *, used: bool) -> None:
    if used and low >= high:
        raise ConfigError(f"--{prefix}-lower-bound {low} must be below --{prefix}-upper-bound {high}")
