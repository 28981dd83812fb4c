"""Off-policy corrections of the policy loss: log-probs of trainer and engine -> weights and a mask.

Here are the inputs and outputs of components of kind "corrections" (`--use-tis`, `--custom-tis-function-path`), which
`corrector.py` calls. A correction weighs a whole optimizer step at once, before its first micro-batch, so normalisation
over the step does not depend on how samples are split.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from slime_core.ops.masking import AllReduce

SETTINGS = (
    *("tis_clip", "tis_clip_low", "tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound"),
    *("tis_batch_normalize", "use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound"),
    *("rs_veto_threshold", "rs_trust_region", "rs_tr_threshold"),
)
"""All settings that slime's corrections may read; each correction lists its settings in `reads`."""


@dataclass
class CorrectionInputs:
    """Concatenated response tokens of whole samples: [T] tensors without gradients, T = sum(sample_lengths)."""

    train_log_probs: torch.Tensor
    """Log-probs of the trainer's policy at the start of the update (the proximal policy)."""
    rollout_log_probs: torch.Tensor
    """Log-probs of the engine that sampled the tokens (the behaviour policy)."""
    loss_mask: torch.Tensor
    sample_lengths: list[int]
    staleness: torch.Tensor | None = None
    """Weight versions between sampling and this update; None when every token is fresh."""
    all_reduce: AllReduce | None = None
    """Sum over data-parallel ranks; the samples of all ranks together form one optimizer step. None when only one
    micro-batch is known at a time (`--proximal-policy interpolate`)."""
    sibling_counts: list[int] | None = None
    """[n] fan-out siblings of each sample, itself included, for means over sequences, which count a rollout
    once; None if no sample has siblings."""


@dataclass
class CorrectionOutputs:
    """Weights and mask that a correction applies to the policy loss.

    The corrected loss is loss_t * weights_t * loss_mask_t over unchanged denominators.
    """

    weights: torch.Tensor
    """[T]"""
    loss_mask: torch.Tensor
    """[T] the mask without rejected tokens."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """name -> [T]; logged as `train/<name>`, a mean over the tokens of the original mask."""


class Correction(Protocol):
    """Off-policy correction by importance weights and rejection. Constructed as `cls(args)`.

    Called on every rank once per optimizer step with the rank's samples of the step, so that sums and means over the
    step (with `all_reduce`) do not depend on how samples are split. THUDM/slime's functions, which see one micro-batch,
    are accepted too.
    """

    whole_step: bool
    """True if the correction needs `CorrectionInputs.all_reduce`."""
    reads: ClassVar[tuple[str, ...]]
    """Settings that this correction reads; setting any other correction's setting is an error."""

    def weigh(self, inputs: CorrectionInputs) -> CorrectionOutputs:
        """Return weights and mask; no gradient flows through them."""
