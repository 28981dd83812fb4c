"""Supervised fine-tuning: the loss `sft_loss`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from slime_core.learning.loss import LossBase
from slime_core.learning.tensors import Denominators, TrainTensors, gather
from slime_core.ops.masking import weighted_sum
from slime_core.protocols import LossFn, MicroBatchOutput
from slime_core.sample import TrainBatch


class SFTLoss(LossBase):
    """Minus the mean log-prob of the unmasked tokens. Metric: `loss`."""

    needs_advantages = False
    ignores: ClassVar[Sequence[str]] = (
        *("advantage_estimator", "normalize_advantages", "eps_clip", "eps_clip_high", "eps_clip_c"),
        *("entropy_coef", "use_kl_loss", "kl_coef", "keep_old_actor"),
    )

    def bind(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
        """See `Loss.bind`."""

        def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mask = gather(tensors.loss_masks, output.positions)
            assert mask is not None
            loss = -weighted_sum(output.log_probs, denominators.weights(batch, output.positions, mask))
            return loss, {"loss": loss.detach()}

        return loss_fn
