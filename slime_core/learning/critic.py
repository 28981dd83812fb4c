"""Stage 9 for the critic: a micro-batch's values -> the clipped value loss and its metrics.

Bound by the learner to each optimizer step, like a policy loss, with the same denominators. The loss has no factor one
half (THUDM/slime's convention), so `--critic-lr` is to be read with that in mind.
"""

from __future__ import annotations

import torch

from slime_core.learning.tensors import Denominators, TrainTensors, gather
from slime_core.ops.masking import weighted_sum
from slime_core.ops.surrogate import clipped_value_loss
from slime_core.protocols import Args, LossFn, MicroBatchOutput
from slime_core.sample import TrainBatch


def value_loss(args: Args, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
    """The loss function of one optimizer step over the rank's local `batch`.

    max((V_clip - R)^2, (V - R)^2) with V_clip = V_old + clip(V - V_old, -value_clip, value_clip) (PPO2, Dhariwal et
    al., 2017). Metrics: `value_loss`, and `value_clipfrac`: how many values moved further than `--value-clip`.
    """

    def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        positions = output.positions
        mask, returns = gather(tensors.loss_masks, positions), gather(tensors.returns, positions)
        old = gather(tensors.values, positions)
        assert output.values is not None, "a critic's trainer fills values"
        assert mask is not None
        assert returns is not None, "bound before returns were computed"
        assert old is not None, "bound before values were computed"
        loss, clipfrac = clipped_value_loss(output.values, old, returns, args.value_clip)
        weights = denominators.weights(batch, positions, mask)
        total = weighted_sum(loss, weights)
        return total, {"value_loss": total.detach(), "value_clipfrac": weighted_sum(clipfrac, weights)}

    return loss_fn
