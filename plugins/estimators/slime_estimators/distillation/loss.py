"""The loss `distillation`: the policy loss and a divergence of the policy from a teacher at every trained token.

The mean over tokens or rollouts is the policy loss's. The states are those that the policy sampled; as in GKD no
gradient flows through the sampling. With `top_k` 0 the gradient of the first step is that of `--loss-type policy_loss`
with the gap of log-probs in the advantages (`--opd-kl-coef`), which is 0 here unless the user gives it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

import torch

from slime_core import Args, PluginOptions, TrainBatch, options, resolve
from slime_core.errors import ConfigError, TrainError
from slime_core.learning.corrector import Corrector
from slime_core.learning.loss import MakeReducer, PolicyLoss
from slime_core.learning.tensors import Column, Denominators, TrainTensors
from slime_core.ops import weighted_sum
from slime_core.protocols import (
    AdvantageEstimator,
    LossFn,
    LossInputs,
    MicroBatchOutput,
    Trainer,
    TrainerTraits,
    traits_of,
)
from slime_estimators.distillation import TURN_WEIGHTS, Options, unpack_likeliest
from slime_estimators.distillation.divergence import estimate

__all__ = ["Distillation"]


class Distillation(PolicyLoss):
    """The policy loss plus `coef` times the divergence from the teacher.

    Metrics: `divergence`, its mean before the weights of turns, and with `top_k` also `teacher_top_mass`, the teacher's
    probability of the tokens it names, and `outside_top`, the share of sampled tokens that are not among them.
    """

    Options: ClassVar[type[PluginOptions]] = Options

    def __init__(
        self,
        args: Args,
        estimator: AdvantageEstimator,
        corrector: Corrector | None = None,
        reducer: MakeReducer | None = None,
    ) -> None:
        super().__init__(args, estimator, corrector, reducer)
        self.chosen = options(args, "distillation", Options)
        self.needs_logits = self.chosen.top_k > 0
        self._likeliest: list[Column] | None = None
        """Ids and log-probs of the trainer's teacher, of this rank's samples; None with a teacher elsewhere."""

    @classmethod
    def check_settings(cls, settings: Any) -> list[str]:
        """Leave the advantages to the rewards. Raises ConfigError without a teacher, or if a setting excludes it."""
        args, cited = settings.args, settings.cite("loss_type")
        if not args.use_opd:
            raise ConfigError(
                f"{cited} needs a teacher; type --use-opd --opd-type local --opd-teacher-load DIR (or self, or sglang)"
            )
        chosen = options(args, "distillation", Options)
        if chosen.top_k and (args.use_sampling_mask or args.true_on_policy_mode):
            other = settings.cite("use_sampling_mask" if args.use_sampling_mask else "true_on_policy_mode")
            raise ConfigError(f"{other}: plugins.distillation.top_k {chosen.top_k} compares whole distributions; use 0")
        _check_teacher_rate(settings, chosen.teacher_rate)
        if not settings.is_given("opd_kl_coef"):
            settings.derive("opd_kl_coef", 0.0, "loss_type")
            return []
        both = f"{settings.cite('opd_kl_coef')} with {cited}: the teacher is in the advantages and in the loss"
        return [f"{both}; leave it out for the loss alone"] if args.opd_kl_coef and chosen.coef else []

    def teacher_log_probs(
        self, trainer: Trainer, batch: TrainBatch, micro_batches: list[list[int]], *, role: Literal["actor", "teacher"]
    ) -> Column:
        """Return the log-probs, and keep those of the teacher's likeliest tokens; see `Loss.teacher_log_probs`."""
        number, rate = self.chosen.top_k, self.chosen.teacher_rate
        if rate:
            mover: Any = trainer
            mover.update_teacher(rate)
        if not number:
            return super().teacher_log_probs(trainer, batch, micro_batches, role=role)
        if not hasattr(trainer, "over_logits"):
            raise TrainError(
                f"plugins.distillation.top_k {number}: {type(trainer).__name__} has no over_logits; use 0, another"
                " --train-backend, or a teacher on a server (--opd-type sglang)"
            )
        log_probs, *self._likeliest = trainer.over_logits(batch, micro_batches, partial(_likeliest, number), role=role)
        found: Column = log_probs
        return found

    def bind(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
        """Add the divergence; see `Loss.bind`. Raises TrainError for a sample of which no teacher has said enough."""
        policy = super().bind(batch, tensors, denominators)
        turns = self._turn_weights(batch, tensors)

        def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, metrics = policy(output)
            inputs = self._inputs(batch, tensors, output)
            weights = denominators.weights(batch, output.positions, inputs.loss_mask)
            values, own = self._divergence(batch, output, inputs)
            weighted = weights * torch.cat([turns[p] for p in output.positions])
            total = loss + self.chosen.coef * weighted_sum(values, weighted)
            found = {"divergence": values.detach(), **own}
            sums = {name: weighted_sum(value, weights) for name, value in found.items()}
            return total, {**metrics, **sums, "loss": total.detach()}

        return loss_fn

    def _divergence(
        self, batch: TrainBatch, output: MicroBatchOutput, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the estimate [T] and metrics [T]; masked tokens have any finite value."""
        assert inputs.teacher_log_probs is not None, "the learner checks for a teacher under use_opd"
        sampled_at = inputs.old_log_probs if inputs.rollout_log_probs is None else inputs.rollout_log_probs
        trained = inputs.loss_mask != 0
        columns = [inputs.log_probs, inputs.teacher_log_probs, sampled_at]
        p, q, b = (torch.where(trained, column, torch.zeros_like(column)) for column in columns)
        chosen = self.chosen
        ids, top_q, top_p, targets = self._of_top(batch, output, p)
        known = (ids >= 0) & trained[:, None]
        among = ((ids == targets[:, None]) & known).any(-1) | ~trained
        values = estimate(
            top_p, top_q, p, q, b, known, among, divergence=chosen.divergence, beta=chosen.beta, tail=chosen.tail
        )
        if not chosen.top_k:
            return values, {}
        mass = torch.where(known, top_q.exp(), torch.zeros_like(top_q)).sum(-1)
        return values, {"teacher_top_mass": mass.detach(), "outside_top": (~among).to(mass.dtype)}

    def _of_top(
        self, batch: TrainBatch, output: MicroBatchOutput, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids [T, k], log-probs [T, k] of teacher and policy at them, and the response tokens [T]."""
        rows = [torch.tensor(batch.tokens[p], device=like.device) for p in output.positions]
        lengths = [batch.response_lengths[p] for p in output.positions]
        targets = torch.cat([row[-length:] for row, length in zip(rows, lengths)])
        if output.logits is None or not self.chosen.top_k:
            none = like.new_zeros((len(targets), 0))
            return none.long(), none, none, targets
        pairs = [self._said(batch, p) for p in output.positions]
        ids, top_q = (torch.cat(column).to(like.device) for column in zip(*pairs, strict=True))
        # As many rows as there are tokens; a response's are shifted by one, as each predicts the next token.
        ends = torch.tensor([len(row) for row in rows]).cumsum(0).tolist()
        places = torch.cat([torch.arange(end - n - 1, end - 1) for end, n in zip(ends, lengths)]).to(like.device)
        scores = output.logits.reshape(-1, output.logits.shape[-1])[places] / self.args.rollout_temperature
        ids = torch.where(ids < scores.shape[-1], ids, torch.full_like(ids, -1))  # a larger vocabulary of the teacher
        top_p = scores.gather(-1, ids.clamp(min=0)) - scores.logsumexp(-1, keepdim=True)
        return ids, top_q.to(top_p.dtype), top_p, targets

    def _said(self, batch: TrainBatch, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and log-probs of the teacher's likeliest tokens of a sample, [response_length, k]."""
        if self._likeliest is not None:
            ids, log_probs = (column[position] for column in self._likeliest)
            return ids.long(), log_probs
        length, k = batch.response_lengths[position], self.chosen.top_k
        if not any(batch.loss_masks[position]):
            return torch.full((length, k), -1), torch.zeros((length, k))
        found = unpack_likeliest(_given(batch, position), length)
        if found is None or found[0].shape[1] != k:
            raise TrainError(
                f"sample {batch.sample_indices[position]} has no log-probs of the teacher's {k} likeliest tokens"
                " (plugins.distillation.top_k); type --rm-type on_policy_distillation, which asks for them"
            )
        return torch.tensor(found[0]).long(), torch.tensor(found[1])

    def _turn_weights(self, batch: TrainBatch, tensors: TrainTensors) -> Column:
        """Return the weight of each token's turn; tokens outside of turns have 1."""
        chosen, last = self.chosen, len(self.chosen.turn_weights) - 1
        depth = chosen.first_turns
        if depth is not None and chosen.turn_every:
            depth += batch.rollout_id // chosen.turn_every
        parts = [torch.ones_like(mask) for mask in tensors.loss_masks]
        for i, (part, row) in enumerate(zip(parts, batch.turns, strict=True)):
            if not tensors.loss_masks[i].any():  # a sample that was removed, whose turns are one
                continue
            own = _given(batch, i).get(TURN_WEIGHTS)
            if own is not None and len(own) != len(row):
                raise TrainError(
                    f"sample {batch.sample_indices[i]}: train_metadata[{TURN_WEIGHTS!r}] has {len(own)} weights for"
                    f" {len(row)} turns"
                )
            for number, turn in enumerate(row):
                weight = chosen.turn_weights[min(number, last)] * (1.0 if own is None else float(own[number]))
                part[turn.first : turn.last] = weight if depth is None or number < depth else 0.0
        return parts


def _check_teacher_rate(settings: Any, rate: float) -> None:
    """Raise ConfigError if the teacher is none that the trainer can move."""
    args, cited = settings.args, f"plugins.distillation.teacher_rate {rate:g}"
    if not rate:
        return
    if not args.opd_teacher_load:
        raise ConfigError(f"{cited} moves a teacher in the trainer; type --opd-type local --opd-teacher-load DIR")
    if args.lora_rank:
        raise ConfigError(f"{cited}: with {settings.cite('lora_rank')} the teacher is the base; remove one of the two")
    if not traits_of(resolve("trainers", args.train_backend).obj, TrainerTraits).moves_teacher:
        raise ConfigError(f"{cited}: {settings.cite('train_backend')} keeps its teacher; use embedded, or remove it")


def _given(batch: TrainBatch, position: int) -> dict[str, Any]:
    """Return the `train_metadata` of a sample."""
    return (batch.train_metadata[position] if batch.train_metadata else None) or {}


def _likeliest(number: int, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return log-probs of the tokens [rows], and ids and log-probs of the `number` likeliest ones [rows, number].

    Of a smaller vocabulary the last ids are -1.
    """
    scores = logits.log_softmax(dim=-1)
    top = scores.topk(min(number, scores.shape[-1]), dim=-1)
    missing = (0, number - top.indices.shape[-1])
    ids, log_probs = (torch.nn.functional.pad(x, missing, value=v) for x, v in ((top.indices, -1), (top.values, 0.0)))
    return scores.gather(-1, targets[:, None]).squeeze(-1), ids, log_probs
