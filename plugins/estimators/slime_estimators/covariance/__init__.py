"""Entropy control by the covariance of log-prob and advantage: the losses `clip_cov` and `kl_cov`.

Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv 2505.22617, 2025):
the policy's entropy falls by about the covariance of a token's log-prob and its advantage, and few tokens have most of
it. With means over the trained tokens of the optimizer step, on all ranks,

    cov_t = (A_t - mean A) * (log p_t - mean log p)

`clip_cov` takes random tokens with a cov_t inside (low, high) out of the policy loss; `kl_cov` adds
coef * |log p_t - log p_old,t| to the loss of the tokens with the largest cov_t. Everything else is `policy_loss`. The
log-probs of cov_t are those of the old policy, which all samples have before the step: no split of the samples over
micro-batches and ranks changes the choice.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from slime_core import Args, PluginOptions, TrainBatch, options
from slime_core.errors import ConfigError
from slime_core.learning.corrector import Corrector
from slime_core.learning.loss import MakeReducer, PolicyLoss
from slime_core.learning.tensors import Column, Denominators, TrainTensors, gather
from slime_core.ops import weighted_sum
from slime_core.protocols import AdvantageEstimator, LossFn, MicroBatchOutput

__all__ = ["ClipCov", "KLCov"]

logger = logging.getLogger(__name__)

Share = Annotated[float, Field(gt=0, le=1)]
_DIGIT, _DIGITS = 256, 4


class _Covariance(PolicyLoss):
    """The policy loss, with old log-probs of all samples before the first step."""

    def __init__(
        self,
        args: Args,
        estimator: AdvantageEstimator,
        corrector: Corrector | None = None,
        reducer: MakeReducer | None = None,
    ) -> None:
        super().__init__(args, estimator, corrector, reducer)
        if self.old_policy == "interpolated":
            raise ConfigError(
                f"--proximal-policy {args.proximal_policy}: --loss-type {args.loss_type} needs the old log-probs before"
                " the step; remove one"
            )
        self.old_policy = "recomputed"
        self._warn(args)

    def _warn(self, args: Args) -> None:
        """Warn of settings with which the loss does nothing."""


class ClipOptions(PluginOptions):
    """`plugins.clip_cov.*`"""

    share: Share = 2e-4
    """Share of the trained tokens that leave the policy loss, at least one token."""
    low: float = 1.0
    """Covariance above which a token may leave it."""
    high: float = 5.0
    """Covariance below which a token may leave it."""


class ClipCov(_Covariance):
    """The policy loss without random tokens of high covariance. Metric: `cov_share`, the share of tokens left out."""

    Options: ClassVar[type[PluginOptions]] = ClipOptions

    def bind(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
        """Set the advantages of the chosen tokens to 0; see `Loss.bind`."""
        chosen = _Step(batch, tensors, denominators).clipped(
            options(self.args, "clip_cov", ClipOptions), self.args.seed
        )
        assert tensors.advantages is not None, "bound before advantages were computed"
        kept = [part.masked_fill(left_out, 0.0) for part, left_out in zip(tensors.advantages, chosen)]
        policy = super().bind(batch, replace(tensors, advantages=kept), denominators)

        def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, metrics = policy(output)
            _, share = _tokens(batch, tensors, denominators, output, chosen)
            return loss, {**metrics, "cov_share": share}

        return loss_fn


class KLOptions(PluginOptions):
    """`plugins.kl_cov.*`"""

    share: Share = 2e-4
    """Share of the trained tokens with the penalty, at least one token."""
    coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the penalty."""


class KLCov(_Covariance):
    """The policy loss and a KL penalty on tokens of high covariance. Metrics: `cov_share`, `cov_kl` (the penalty)."""

    Options: ClassVar[type[PluginOptions]] = KLOptions

    def _warn(self, args: Args) -> None:
        if args.num_steps_per_rollout == 1 and not args.use_rollout_logprobs:
            logger.warning(
                "--loss-type kl_cov with one optimizer step per rollout: the step starts at its old policy, where the"
                " penalty has no gradient; lower --global-batch-size, or choose clip_cov"
            )

    def bind(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
        """Add the penalty of the chosen tokens; see `Loss.bind`."""
        chosen_options = options(self.args, "kl_cov", KLOptions)
        chosen = _Step(batch, tensors, denominators).largest(chosen_options.share)
        policy = super().bind(batch, tensors, denominators)

        def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, metrics = policy(output)
            weights, share = _tokens(batch, tensors, denominators, output, chosen)
            old = gather(tensors.old_log_probs, output.positions)
            assert old is not None, "the learner recomputes old log-probs for this loss"
            penalty = weighted_sum((output.log_probs - old).abs(), weights)
            total = loss + chosen_options.coef * penalty
            return total, {**metrics, "loss": total.detach(), "cov_share": share, "cov_kl": penalty.detach()}

        return loss_fn


def _tokens(
    batch: TrainBatch, tensors: TrainTensors, denominators: Denominators, output: MicroBatchOutput, chosen: Column
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights [T] of a micro-batch's chosen tokens, 0 for the others, and their sum."""
    mask, picked = gather(tensors.loss_masks, output.positions), gather(chosen, output.positions)
    assert mask is not None
    assert picked is not None
    weights = denominators.weights(batch, output.positions, mask) * picked
    return weights, weights.sum().detach()


class _Step:
    """The covariances of one optimizer step's tokens on this rank, [T] float64, of its trained tokens."""

    def __init__(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> None:
        positions = denominators.positions
        columns = [gather(c, positions) for c in (tensors.loss_masks, tensors.advantages, tensors.old_log_probs)]
        mask, advantages, log_probs = (torch.zeros(0) if column is None else column for column in columns)
        self._batch, self._tensors, self._positions = batch, tensors, positions
        self._reduce = denominators.all_reduce or (lambda tensor: tensor)
        self.trained = mask != 0
        a, p = (column.double().masked_fill(~self.trained, 0.0) for column in (advantages, log_probs))
        self.count, *sums = self._reduce(torch.stack([self.trained.double().sum(), a.sum(), p.sum()])).unbind()
        means = [total / self.count.clamp(min=1) for total in sums]
        self.covariances = (a - means[0]) * (p - means[1])

    def largest(self, share: float) -> Column:
        """Return 1.0 for the share of tokens with the largest covariance, by position in the local batch."""
        return self._spread(_largest(self.covariances, self.trained, self._number(share), self._reduce))

    def clipped(self, chosen: ClipOptions, seed: int) -> Column:
        """Return True for random tokens with a covariance inside the bounds, by position in the local batch."""
        inside = self.trained & (self.covariances > chosen.low) & (self.covariances < chosen.high)
        draws = [torch.zeros(0), *(self._draws(p, seed) for p in self._positions)]
        picked = _largest(torch.cat(draws).to(inside.device), inside, self._number(chosen.share), self._reduce)
        return [part != 0 for part in self._spread(picked)]

    def _number(self, share: float) -> int:
        return max(int(share * self.count.item()), 1)

    def _draws(self, position: int, seed: int) -> torch.Tensor:
        """Return uniform numbers for a sample's tokens that depend on the sample, not on its place among others."""
        name = f"{seed} {self._batch.rollout_id} {self._batch.sample_indices[position]}"
        generator = torch.Generator().manual_seed(random.Random(name).getrandbits(63))
        return torch.rand(self._batch.response_lengths[position], generator=generator)

    def _spread(self, picked: torch.Tensor) -> Column:
        column = [torch.zeros_like(mask) for mask in self._tensors.loss_masks]
        lengths = [len(column[p]) for p in self._positions]
        for p, part in zip(self._positions, torch.split(picked, lengths)):
            column[p] = part.to(column[p])
        return column


def _largest(
    scores: torch.Tensor, among: torch.Tensor, number: int, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return True for the `number` largest scores of all ranks and for those that equal the last of them, [T].

    The last one is found digit by digit (radix selection): four sums over ranks, of 256 counts each.
    """
    bits = (scores.float() + 0.0).view(torch.int32).long()  # + 0.0: -0.0 has other bits than 0.0
    keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits) + 2**31
    low, left, open_ = 0, number, among.clone()
    for place in reversed(range(_DIGITS)):
        digits = (keys >> (8 * place)) % _DIGIT
        counts = reduce(torch.bincount(digits[open_], minlength=_DIGIT).double()).long().flip(0).cumsum(0).tolist()
        digit = next((d for d, count in zip(reversed(range(_DIGIT)), counts) if count >= left), None)
        if digit is None:  # there are fewer
            return among
        left -= counts[_DIGIT - 2 - digit] if digit < _DIGIT - 1 else 0
        low |= digit << (8 * place)
        open_ &= digits == digit
    return among & (keys >= low)
