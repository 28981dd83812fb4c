"""Importance weights of single tokens within two bounds: `tis`, which `--use-tis` takes by itself, and `icepop`."""

from __future__ import annotations

from typing import ClassVar

import torch

from slime_core import Args, CorrectionInputs, CorrectionOutputs
from slime_core.errors import ConfigError
from slime_core.ops import importance_ratio


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


def truncated_weight(importance: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance sampling: (clamp(w, low, high), 1.0 where that changed w), [T] each."""
    weight = importance.clamp(low, high)
    return weight, (weight != importance).to(importance.dtype)


def icepop_weight(importance: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """IcePop: (w inside [low, high], 0 outside; 1.0 where dropped), [T] each."""
    outside = (importance < low) | (importance > high)
    return importance.masked_fill(outside, 0.0), outside.to(importance.dtype)
