"""Stage 9: a micro-batch's log-probs -> the scalar to differentiate and the metrics to add up.

A loss is a component of kind "losses", named by `--loss-type`; the learner binds it to each optimizer step and the
trainer calls the result per micro-batch. What a reader would get wrong: nothing here is a mean over a micro-batch.
Every term is a sum of values times weights whose denominators are the step's, over all ranks, so gradients and
metrics do not depend on how samples are split.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from slime_core.ops.kl import kl_estimate
from slime_core.ops.masking import weighted_sum
from slime_core.pipeline.tensors import Denominators, TrainTensors, gather
from slime_core.protocols import AdvantageEstimator, Args, LossFn, LossInputs, LossOutputs, MicroBatchOutput
from slime_core.types import TrainBatch


class Loss(Protocol):
    """A training objective. Constructed as `cls(args, estimator)`."""

    needs_advantages: ClassVar[bool]
    """False (SFT): no old or reference log-probs are computed and the estimator is not called."""
    needs_entropy: bool
    """The trainer computes the entropy of every token."""

    def __init__(self, args: Args, estimator: AdvantageEstimator) -> None: ...

    def bind(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
        """The loss function of one optimizer step over the rank's local `batch`."""


class PolicyLoss:
    """The estimator's policy loss, minus `entropy_coef` * entropy, plus `kl_loss_coef` * KL(policy || reference).

    Metrics: `loss`, `pg_loss`, `entropy_loss` (the mean entropy), `kl_loss` (with `--use-kl-loss`), and the
    estimator's own (`pg_clipfrac`, `ppo_kl`).
    """

    needs_advantages: ClassVar[bool] = True
    needs_entropy: bool = True

    def __init__(self, args: Args, estimator: AdvantageEstimator) -> None:
        self.args = args
        self.estimator = estimator

    def bind(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
        """See `Loss.bind`; without `tensors.old_log_probs` the policy is its own old policy."""

        def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            inputs = loss_inputs(batch, tensors, output)
            weights = denominators.weights(batch, output.positions, inputs.loss_mask)
            # Off-policy corrections (importance weights, sequence masks) act here: on the per-token loss, after the
            # clip and before the reducer.
            policy = self.estimator.policy_loss(self.args, inputs)
            return self._total(inputs, policy, weights)

        return loss_fn

    def _total(
        self, inputs: LossInputs, policy: LossOutputs, weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        pg_loss = weighted_sum(policy.loss, weights)
        terms = {"pg_loss": pg_loss, **{k: weighted_sum(v.detach(), weights) for k, v in policy.metrics.items()}}
        loss = pg_loss
        if inputs.entropy is not None:
            coef = self.args.entropy_coef
            entropy = weighted_sum(inputs.entropy if coef else inputs.entropy.detach(), weights)
            terms["entropy_loss"] = entropy
            loss = loss - coef * entropy if coef else loss
        if self.args.use_kl_loss:
            kl_loss = weighted_sum(self._kl(inputs), weights)
            terms["kl_loss"] = kl_loss
            loss = loss + self.args.kl_loss_coef * kl_loss
        return loss, {name: value.detach() for name, value in {"loss": loss, **terms}.items()}

    def _kl(self, inputs: LossInputs) -> torch.Tensor:
        assert inputs.ref_log_probs is not None, "the learner computes reference log-probs under use_kl_loss"
        ratio = inputs.log_probs - inputs.old_log_probs if self.args.use_unbiased_kl else None
        return kl_estimate(inputs.log_probs, inputs.ref_log_probs, self.args.kl_loss_type, importance_log_ratio=ratio)


class SFTLoss:
    """Minus the mean log-prob of the unmasked tokens. Metric: `loss`."""

    needs_advantages: ClassVar[bool] = False
    needs_entropy: bool = False

    def __init__(self, args: Args, estimator: AdvantageEstimator) -> None:
        self.args = args

    def bind(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
        """See `Loss.bind`."""

        def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mask = gather(tensors.loss_masks, output.positions)
            assert mask is not None
            loss = -weighted_sum(output.log_probs, denominators.weights(batch, output.positions, mask))
            return loss, {"loss": loss.detach()}

        return loss_fn


def loss_inputs(batch: TrainBatch, tensors: TrainTensors, output: MicroBatchOutput) -> LossInputs:
    """The micro-batch's share of every column, laid end to end like `output.log_probs`."""
    positions = output.positions
    mask, advantages = gather(tensors.loss_masks, positions), gather(tensors.advantages, positions)
    assert mask is not None
    assert advantages is not None, "bound before advantages were computed"
    old = gather(tensors.old_log_probs, positions)
    return LossInputs(
        log_probs=output.log_probs,
        old_log_probs=output.log_probs.detach() if old is None else old,
        advantages=advantages,
        loss_mask=mask,
        sample_lengths=[batch.response_lengths[p] for p in positions],
        returns=gather(tensors.returns, positions),
        rollout_log_probs=gather(tensors.rollout_log_probs, positions),
        ref_log_probs=gather(tensors.ref_log_probs, positions),
        teacher_log_probs=gather(tensors.teacher_log_probs, positions),
        entropy=output.entropy,
    )
