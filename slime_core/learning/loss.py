"""A micro-batch's log-probs -> the scalar to differentiate and the metrics to sum.

A loss is a component of kind "losses", named by `--loss-type`; the learner binds it to each optimizer step and the
trainer calls the result per micro-batch. Nothing here is a mean over a micro-batch. Every term is a sum of values times
weights whose denominators are the step's, over all ranks, so gradients and metrics do not depend on how samples are
split. A critic's loss is `value_loss`.

A reducer (`--custom-pg-loss-reducer-function-path`) replaces the mean over tokens. It is made per micro-batch from
lengths and masks. The policy loss divides its result by the step's number of rollouts over all ranks (with
`--calculate-per-token-loss` by its number of unmasked tokens), like THUDM/slime. A reducer must be a sum of per-sample
terms: a mean over its micro-batch would make the loss depend on how samples are split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch

from slime_core.errors import PluginError, TrainError, rollout_name
from slime_core.learning.tensors import Column, Denominators, TrainTensors, gather
from slime_core.ops.masking import weighted_sum
from slime_core.ops.ratios import (
    clipped_value_loss,
    interpolated_log_probs,
    kl_estimate,
    off_policy_sequences,
    ratio_from_kl,
    token_kl,
)
from slime_core.protocols import AdvantageEstimator, Args, LossFn, LossInputs, MicroBatchOutput, Trainer
from slime_core.sample import TrainBatch
from slime_core.workers.call import user_code

if TYPE_CHECKING:
    from slime_core.learning.corrector import Corrector

OldPolicy = Literal["reused", "recomputed", "interpolated"]
"""Source of old log-probs: the first step's own, a pass of the trainer over all samples, or the loss itself."""


class Loss(Protocol):
    """A training objective. Constructed as `cls(args, estimator)`."""

    needs_advantages: bool | None
    """False (SFT): no old or reference log-probs are computed and the estimator is not called. None, on a class only:
    the settings decide whether advantages are computed, and each instance has True or False."""
    needs_entropy: bool
    """True if the trainer must compute the entropy of every token."""
    needs_logits: bool
    """True if the trainer must pass logits instead of log-probs."""
    needs_function: ClassVar[bool]
    """True if the loss needs `--custom-loss-function-path`."""
    old_policy: OldPolicy
    ignores: ClassVar[Sequence[str]]
    """Policy-loss settings that have no effect with this loss; setting one logs a warning."""

    def kept(self, batch: TrainBatch, tensors: TrainTensors, steps: Sequence[Denominators]) -> Column:
        """Return the loss masks without the tokens that the loss will reject; `--normalize-advantages` uses them."""

    def teacher_log_probs(
        self, trainer: Trainer, batch: TrainBatch, micro_batches: list[list[int]], *, role: Literal["actor", "teacher"]
    ) -> Column:
        """Return log-probs of the trainer's teacher; a loss that reads more of the teacher keeps it for `bind`.

        Args:
            trainer: Trainer of the actor.
            batch: This rank's samples, with the prompts that the teacher sees.
            micro_batches: Positions in the batch.
            role: Model of the trainer that is the teacher: "actor" with `--opd-type self`.
        """

    def bind(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
        """Return the loss function of one optimizer step over the rank's local `batch`."""


class LossBase:
    """Default attributes and methods of a loss."""

    needs_advantages: bool | None = None
    needs_entropy: bool = False
    needs_logits: bool = False
    needs_function: ClassVar[bool] = False
    old_policy: OldPolicy = "reused"
    ignores: ClassVar[Sequence[str]] = ()

    def __init__(self, args: Args, estimator: AdvantageEstimator | None) -> None:
        self.args = args

    def kept(self, batch: TrainBatch, tensors: TrainTensors, steps: Sequence[Denominators]) -> Column:
        """Return all masks unchanged; see `Loss.kept`."""
        return tensors.loss_masks

    def teacher_log_probs(
        self, trainer: Trainer, batch: TrainBatch, micro_batches: list[list[int]], *, role: Literal["actor", "teacher"]
    ) -> Column:
        """Return the log-probs alone; see `Loss.teacher_log_probs`."""
        return trainer.log_probs(batch, micro_batches, role=role)


class PolicyLoss(LossBase):
    """The estimator's policy loss, minus `entropy_coef` * entropy, plus `kl_loss_coef` * KL(policy || reference).

    Three steps apply to the policy loss only, in this order: off-policy sequence masking (`--use-opsm`), the off-policy
    correction (`--use-tis`) and the reducer. Entropy and KL keep the plain mask and the plain mean.

    Metrics: `loss`, `pg_loss`, `entropy_loss` (the mean entropy), `kl_loss` (with `--use-kl-loss`), the estimator's
    own (`pg_clipfrac`, `ppo_kl`), `opsm_clipfrac`, and the correction's with `ois`, the ratio to the old policy.

    Args:
        args: The run's settings.
        estimator: Computes the loss of every token.
        corrector: Off-policy correction, or its metrics.
        reducer: Replaces the mean over rollouts or tokens, for the policy loss.
    """

    needs_advantages = True
    needs_entropy = True

    def __init__(
        self,
        args: Args,
        estimator: AdvantageEstimator,
        corrector: Corrector | None = None,
        reducer: MakeReducer | None = None,
    ) -> None:
        self.args = args
        self.estimator = estimator
        self.corrector = corrector
        self.reducer = reducer
        self.old_policy = "recomputed" if corrector is not None else "reused"
        if args.proximal_policy == "interpolate":
            self.old_policy = "interpolated"

    def kept(self, batch: TrainBatch, tensors: TrainTensors, steps: Sequence[Denominators]) -> Column:
        """Return the masks without the tokens that the correction rejects; see `Loss.kept`."""
        return tensors.loss_masks if self.corrector is None else self.corrector.kept(batch, tensors, steps)

    def bind(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
        """Return the loss function of a step; without `tensors.old_log_probs` the policy is its own old policy.

        Raises:
            TrainError: A correction or an interpolated policy needs the engine's log-probs, which are missing.
        """
        if self.old_policy == "interpolated":
            tensors = replace(tensors, old_log_probs=None)
            if tensors.rollout_log_probs is None:
                raise TrainError(
                    f"{rollout_name(batch.rollout_id)}: --proximal-policy interpolate, but the samples carry no"
                    " rollout_log_probs; the generate function must record them"
                )
        correct = None if self.corrector is None else self.corrector.for_step(batch, tensors, denominators)

        def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            inputs = self._inputs(batch, tensors, output)
            weights = denominators.weights(batch, output.positions, inputs.loss_mask)
            policy = self.estimator.policy_loss(self.args, inputs)
            loss, mask, metrics = policy.loss, inputs.loss_mask, dict(policy.metrics)
            if self.args.use_opsm:
                dropped = self._off_policy(inputs)
                loss, metrics["opsm_clipfrac"] = torch.where(dropped != 0, torch.zeros_like(loss), loss), dropped
            if correct is not None:
                loss, mask, found = correct(inputs, output.positions, loss)
                kl = metrics.get("ppo_kl", token_kl(inputs.log_probs, inputs.old_log_probs))
                metrics |= {**found, "ois": ratio_from_kl(kl)}
            pg_loss = self._reduce(batch, output.positions, loss, mask, denominators)
            terms = {name: weighted_sum(value.detach(), weights) for name, value in metrics.items()}
            return self._total(inputs, pg_loss, terms, weights)

        return loss_fn

    def _inputs(self, batch: TrainBatch, tensors: TrainTensors, output: MicroBatchOutput) -> LossInputs:
        inputs = loss_inputs(batch, tensors, output)
        if self.old_policy != "interpolated":
            return inputs
        assert inputs.rollout_log_probs is not None
        old = interpolated_log_probs(inputs.log_probs, inputs.rollout_log_probs, inputs.staleness)
        return replace(inputs, old_log_probs=old)

    def _off_policy(self, inputs: LossInputs) -> torch.Tensor:
        columns = (inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.loss_mask)
        return off_policy_sequences(*columns, inputs.sample_lengths, self.args.opsm_delta)

    def _reduce(
        self,
        batch: TrainBatch,
        positions: Sequence[int],
        loss: torch.Tensor,
        mask: torch.Tensor,
        denominators: Denominators,
    ) -> torch.Tensor:
        if self.reducer is None:
            # The denominators use the original mask, even if a correction has removed tokens from `mask`.
            return weighted_sum(loss, denominators.weights(batch, positions, mask))

        lengths = [batch.response_lengths[p] for p in positions]
        totals = [len(batch.tokens[p]) for p in positions]
        return reduced(self.reducer, self.args, loss, mask, totals, lengths) / denominators.total

    def _total(
        self, inputs: LossInputs, pg_loss: torch.Tensor, found: dict[str, torch.Tensor], weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        terms = {"pg_loss": pg_loss, **found}
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


def loss_inputs(batch: TrainBatch, tensors: TrainTensors, output: MicroBatchOutput) -> LossInputs:
    """Return the micro-batch's part of every column, concatenated like `output.log_probs`."""
    positions = output.positions
    mask, advantages = gather(tensors.loss_masks, positions), gather(tensors.advantages, positions)
    assert mask is not None
    assert advantages is not None, "bound before advantages were computed"
    old = gather(tensors.old_log_probs, positions)
    others = "returns rollout_log_probs ref_log_probs teacher_log_probs staleness"
    return LossInputs(
        log_probs=output.log_probs,
        old_log_probs=output.log_probs.detach() if old is None else old,
        advantages=advantages,
        loss_mask=mask,
        sample_lengths=[batch.response_lengths[p] for p in positions],
        entropy=output.entropy,
        **{name: gather(getattr(tensors, name), positions) for name in others.split()},
    )


def value_loss(args: Args, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
    """Return the critic's loss function of one optimizer step over the rank's local `batch`.

    max((V_clip - R)^2, (V - R)^2) with V_clip = V_old + clip(V - V_old, -value_clip, value_clip) (PPO2, Dhariwal et
    al., 2017). Metrics: `value_loss`, and `value_clipfrac`: fraction of values that moved further than `--value-clip`.
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


MakeReducer = Callable[..., Callable[[torch.Tensor], torch.Tensor]]
"""(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> ([T] -> scalar)."""


def reduced(
    make: MakeReducer,
    args: Args,
    loss: torch.Tensor,
    mask: torch.Tensor,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> torch.Tensor:
    """Return the micro-batch's sum by a reducer, a scalar.

    Args:
        make: Makes the reducer.
        args: The run's settings.
        loss: [T] per-token loss.
        mask: [T] after corrections; masked tokens of `loss` reach the reducer as 0.
        total_lengths: [n] prompt and response tokens.
        response_lengths: [n].

    Raises:
        PluginError: The reducer raised, or the result is no scalar tensor.
    """
    masks = list(torch.split(mask, list(response_lengths)))
    name = f"--custom-pg-loss-reducer-function-path {args.custom_pg_loss_reducer_function_path!r}"
    with user_code(name):
        reduce = make(list(total_lengths), list(response_lengths), masks, args.calculate_per_token_loss)
        value = reduce(torch.where(mask != 0, loss, torch.zeros_like(loss)))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise PluginError(f"{name}: the reducer must return a scalar tensor; found {found}")
    return value.reshape(())
