"""Off-policy corrections of the policy loss: log-probs of trainer and engine -> weights and a mask.

What a component of kind "corrections" gets and returns, and the built-in ones (`--use-tis`,
`--custom-tis-function-path`); `learning/corrector.py` calls them. A correction weighs a whole optimizer step at once,
before its first micro-batch, so normalisation over the step does not depend on how samples are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from slime_core.errors import ConfigError
from slime_core.ops.corrections import (
    bounded_weights,
    importance_at,
    inside,
    mean_weight,
    mismatch_metrics,
    trust_region,
    veto,
)
from slime_core.ops.masking import AllReduce
from slime_core.ops.ratios import icepop_weight, importance_ratio, truncated_weight
from slime_core.protocols import Args

SETTINGS = (
    *("tis_clip", "tis_clip_low", "tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound"),
    *("tis_batch_normalize", "use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound"),
    *("rs_veto_threshold", "rs_trust_region", "rs_tr_threshold"),
)
"""Every setting that a built-in correction may read; each says in `reads` which ones it does."""


@dataclass
class CorrectionInputs:
    """Response tokens of whole samples laid end to end: [T] tensors without gradients, T = sum(sample_lengths)."""

    train_log_probs: torch.Tensor
    """Of the trainer's policy at the start of the update (the proximal policy)."""
    rollout_log_probs: torch.Tensor
    """Of the engine that sampled the tokens (the behaviour policy)."""
    loss_mask: torch.Tensor
    sample_lengths: list[int]
    staleness: torch.Tensor | None = None
    """Weight versions between sampling and this update; None when every token is fresh."""
    all_reduce: AllReduce | None = None
    """Sum over data-parallel ranks; the samples of all ranks are those of one optimizer step. None when only one
    micro-batch is known at a time (`--proximal-policy interpolate`)."""
    sibling_counts: list[int] | None = None
    """[n] fan-out siblings of each sample, itself included, for means over sequences, which count a rollout
    once; None: no sample has any."""


@dataclass
class CorrectionOutputs:
    """What a correction makes of the policy loss: loss_t * weights_t * loss_mask_t over unchanged denominators."""

    weights: torch.Tensor
    """[T]"""
    loss_mask: torch.Tensor
    """[T] the mask without what is rejected."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """name -> [T]; logged as `train/<name>`, a mean over the tokens of the original mask."""


class Correction(Protocol):
    """Off-policy correction by importance weights and rejection. Constructed as `cls(args)`.

    Called on every rank once per optimizer step with the rank's samples of the step, so that what it takes over
    the step (with `all_reduce`) does not depend on how samples are split. THUDM/slime's functions, which see one
    micro-batch, are accepted too.
    """

    whole_step: bool
    """Needs `CorrectionInputs.all_reduce`."""
    reads: ClassVar[tuple[str, ...]]
    """Settings of the corrections that this one reads; setting another one is an error."""

    def weigh(self, inputs: CorrectionInputs) -> CorrectionOutputs:
        """Weights and mask; no gradient flows through them."""


class TruncatedImportanceSampling:
    """Truncated importance sampling (Yao et al., 2025): weight clamp(w, tis_clip_low, tis_clip), w = trainer / engine.

    Metrics: `tis` (w), `tis_clipfrac`, `tis_abs` (|w - 1|).
    """

    whole_step: bool = False
    reads: ClassVar[tuple[str, ...]] = ("tis_clip", "tis_clip_low")

    def __init__(self, args: Args) -> None:
        self.low, self.high = args.tis_clip_low, args.tis_clip
        if self.low > self.high:
            raise ConfigError(f"--tis-clip-low {self.low} exceeds --tis-clip {self.high}")

    def weigh(self, inputs: CorrectionInputs) -> CorrectionOutputs:
        """See `Correction.weigh`."""
        ratio = importance_ratio(inputs.train_log_probs, inputs.rollout_log_probs)
        weights, changed = self._bound(ratio)
        metrics = {"tis": ratio, "tis_clipfrac": changed, "tis_abs": (ratio - 1).abs()}
        return CorrectionOutputs(weights, inputs.loss_mask, metrics)

    def _bound(self, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return truncated_weight(ratio, self.low, self.high)


class IcePop(TruncatedImportanceSampling):
    """IcePop (Ling team, 2025): weight w inside [tis_clip_low, tis_clip], 0 outside. Metrics as for `tis`."""

    def _bound(self, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return icepop_weight(ratio, self.low, self.high)


class MismatchImportanceSampling:
    """THUDM/slime's MIS example as settings: weights by level and mode, rejection by its own level and bounds, veto,
    trust region, normalisation over the optimizer step.

    Metrics, prefix `mis_`: those of `ops.corrections.mismatch_metrics`, the weight before and after its bounds, the
    share of tokens beyond each bound or rejected, and the normaliser.
    """

    reads: ClassVar[tuple[str, ...]] = tuple(name for name in SETTINGS if name != "tis_clip_low")

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
        """See `Correction.weigh`."""
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
