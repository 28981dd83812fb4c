"""Stages 8 to 10 of one rollout: `TrainBatch` -> optimizer steps -> metrics, on one data-parallel rank.

Called by the loop with the whole batch on every rank; each rank schedules it alike and takes its share. What a
reader would get wrong: the "old" log-probs. Samples of the first optimizer step use that step's own, detached, which
costs no extra forward pass; the trainer recomputes those of later steps' samples before the first step. Estimators
that need them beforehand (sequence ratios, KL in the reward, `needs_log_probs`) get recomputed ones for all. With
`--use-rollout-logprobs` they are the engine's.

Metrics: `train/*` are means over the rollout's optimizer steps (`train/lr`: the last one;
`train/skipped_steps`: their number), `rollout/*` describe the
data before the update (`pipeline/report.py`). `train/train_rollout_logprob_abs_diff` compares the trainer's log-probs
before the update with the engine's (with `--use-rollout-logprobs` on the first step's samples only).

A loss that is NaN or infinite raises `TrainError` before its backward pass. A gradient norm that is not finite raises
unless the trainer reports `skipped_steps` 1, that is, it left the weights alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from slime_core.errors import ConfigError, TrainError
from slime_core.models.config import load_model_config
from slime_core.ops.flops import DecoderShape
from slime_core.pipeline.advantages import compute_advantages
from slime_core.pipeline.loss import Loss
from slime_core.pipeline.packing import Cost, PackingPolicy, RankSchedule, Schedule, build_schedule
from slime_core.pipeline.report import log_prob_gap, rollout_report
from slime_core.pipeline.tensors import Column, Denominators, TrainTensors
from slime_core.protocols import AdvantageEstimator, Args, LossFn, MicroBatchOutput, Trainer
from slime_core.types import TrainBatch

LAST_VALUE = ("lr",)
"""Step metrics reported as the last step's value, not the mean."""

COUNTED = ("skipped_steps",)
"""Step metrics added up."""


class Learner:
    """Drives a trainer through the optimizer steps of each rollout.

    Args:
        args: The run's settings.
        trainer: This rank's trainer.
        estimator: None for losses that need no advantages.
        loss: The objective.

    Raises:
        ConfigError: The loss needs advantages but nothing may compute them.
    """

    def __init__(self, args: Args, trainer: Trainer, estimator: AdvantageEstimator | None, loss: Loss) -> None:
        if loss.needs_advantages and (estimator is None or not args.compute_advantages_and_returns):
            raise ConfigError(
                f"--loss-type {args.loss_type} needs advantages; drop --disable-compute-advantages-and-returns or"
                " choose a loss without them, such as sft_loss"
            )
        self.args = args
        self.trainer = trainer
        self.estimator = estimator
        self.loss = loss
        self._cost = _sample_cost(args)

    def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """Take the rollout's optimizer steps.

        Args:
            rollout_id: Number of the rollout.
            batch: All samples of the rollout, the same on every rank.

        Returns:
            Metrics, the same on every rank but for `perf/*`.

        Raises:
            TrainError: Nothing to train on, a column is missing, or a loss or gradient is not finite.
        """
        if not any(map(any, batch.loss_masks)):
            raise TrainError(
                f"rollout {rollout_id}: every response token of all {len(batch)} samples is masked; nothing to train"
                " on. Look for failed or removed samples and for filters or loss masks that are too strict"
            )
        policy = PackingPolicy.from_args(self.args, self.trainer.world_size)
        schedule = build_schedule(batch, policy, self._cost)
        share = schedule.for_rank(self.trainer.rank)
        local = batch.select(share.indices)
        clock = _Clock()
        tensors = self._prepare(local, share, clock)
        watch = _Watch(rollout_id, local)
        with clock.timed("actor_train"):
            steps = self._take_steps(batch, local, tensors, schedule, share, watch)
        metrics = {f"train/{name}": value for name, value in _over_steps(steps).items()}
        metrics |= self._describe(batch, local, tensors, watch)
        if self.args.ref_update_interval and (rollout_id + 1) % self.args.ref_update_interval == 0:
            self.trainer.update_reference()
        return metrics | clock.metrics()

    # -- before the steps ----------------------------------------------------------------------------

    def _prepare(self, local: TrainBatch, share: RankSchedule, clock: _Clock) -> TrainTensors:
        """The local batch as tensors, with log-probs and advantages as far as the loss needs them."""
        tensors = TrainTensors.from_batch(local, self.trainer.device)
        if not self.loss.needs_advantages:
            return tensors
        assert self.estimator is not None
        micro_batches = [micro_batch for step in share.steps for micro_batch in step]
        if self.args.use_rollout_logprobs:
            if tensors.rollout_log_probs is None:
                raise TrainError(
                    f"rollout {local.rollout_id}: --use-rollout-logprobs, but the samples carry no rollout_log_probs;"
                    " the generate function must record them"
                )
            tensors.old_log_probs = tensors.rollout_log_probs
        elif self._needs_all_log_probs():
            with clock.timed("log_probs"):
                tensors.old_log_probs = self.trainer.log_probs(local, micro_batches, role="actor")
        if self._needs_reference():
            with clock.timed("ref_log_probs"):
                tensors.ref_log_probs = self.trainer.log_probs(local, micro_batches, role="ref")
        tensors = compute_advantages(self.args, local, tensors, self.estimator, self.trainer.all_reduce)
        if tensors.old_log_probs is None and len(share.steps) > 1:
            with clock.timed("log_probs"):
                tensors.old_log_probs = self._later_log_probs(local, share)
        return tensors

    def _later_log_probs(self, local: TrainBatch, share: RankSchedule) -> Column:
        """Those of all but the first step's samples, which come first in the local batch and get empty tensors."""
        first = sum(map(len, share.steps[0]))
        micro_batches = [[p - first for p in micro_batch] for step in share.steps[1:] for micro_batch in step]
        later = local.select(range(first, len(local)))
        found = self.trainer.log_probs(later, micro_batches, role="actor")
        return [torch.zeros(0, device=self.trainer.device)] * first + found

    def _reuses_own_log_probs(self) -> bool:
        """The first step's policy is its own old policy."""
        return self.loss.needs_advantages and not self.args.use_rollout_logprobs and not self._needs_all_log_probs()

    def _needs_all_log_probs(self) -> bool:
        assert self.estimator is not None
        sequence_level = self.estimator.ratio_level == "sequence"
        return sequence_level or self.estimator.needs_log_probs or bool(self.args.kl_coef)

    def _needs_reference(self) -> bool:
        return bool(self.args.kl_coef) or self.args.use_kl_loss

    # -- the steps -----------------------------------------------------------------------------------

    def _take_steps(
        self,
        batch: TrainBatch,
        local: TrainBatch,
        tensors: TrainTensors,
        schedule: Schedule,
        share: RankSchedule,
        watch: _Watch,
    ) -> list[dict[str, float]]:
        metrics = []
        for number, (step, micro_batches) in enumerate(zip(schedule.steps, share.steps)):
            per_token = self.args.calculate_per_token_loss
            denominators = Denominators.of(batch, step.samples, per_token=per_token)
            reuses = number == 0 and self._reuses_own_log_probs()
            known = replace(tensors, old_log_probs=None) if reuses else tensors
            loss_fn = watch.over(self.loss.bind(local, known, denominators), keep=number == 0)
            found = self.trainer.train_step(local, micro_batches, loss_fn, with_entropy=self.loss.needs_entropy)
            norm = found.get("grad_norm", 0.0)
            if not math.isfinite(norm) and not found.get("skipped_steps"):
                raise TrainError(f"rollout {batch.rollout_id}, optimizer step {number}: gradient norm {norm}")
            metrics.append(found)
        return metrics

    # -- after the steps -----------------------------------------------------------------------------

    def _describe(self, batch: TrainBatch, local: TrainBatch, tensors: TrainTensors, watch: _Watch) -> dict[str, float]:
        # The trainer's own log-probs before the update, by position.
        known = {} if self.args.use_rollout_logprobs else dict(enumerate(tensors.old_log_probs or ()))
        if not known or self._reuses_own_log_probs():
            known |= watch.first_step
        # Every rank has samples in every step, so all ranks agree on this.
        column = [known[p] for p in range(len(local))] if len(known) == len(local) else None
        metrics = rollout_report(batch, local, tensors, column, self.trainer)
        if tensors.rollout_log_probs is not None:
            metrics |= log_prob_gap(tensors, known, self.trainer)
        return metrics


class _Watch:
    """Checks every micro-batch's loss, and keeps the log-probs of the first step's."""

    def __init__(self, rollout_id: int, local: TrainBatch) -> None:
        self._rollout_id = rollout_id
        self._local = local
        self.first_step: dict[int, torch.Tensor] = {}
        """Log-probs before the update of the samples in the first step, by position."""

    def over(self, loss_fn: LossFn, *, keep: bool) -> LossFn:
        """The same function, watched."""

        def watched(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if keep:
                lengths = [self._local.response_lengths[p] for p in output.positions]
                self.first_step.update(zip(output.positions, torch.split(output.log_probs.detach(), lengths)))
            loss, metrics = loss_fn(output)
            if not torch.isfinite(loss.detach()):
                raise TrainError(self._complaint(loss.item(), output))
            return loss, metrics

        return watched

    def _complaint(self, loss: float, output: MicroBatchOutput) -> str:
        samples = [self._local.sample_indices[p] for p in output.positions]
        bad = int((~torch.isfinite(output.log_probs.detach())).sum())
        return (
            f"rollout {self._rollout_id}: the loss of a micro-batch is {loss} (samples {samples[:16]}; {bad} of"
            f" {output.log_probs.numel()} log-probs not finite)"
        )


class _Clock:
    """Seconds per named part."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        return {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}


def _over_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the steps, but for those in `LAST_VALUE` and `COUNTED`; `steps` counts them."""
    last = steps[-1]
    sums = {name: sum(step[name] for step in steps) for name in last}
    means = {name: total if name in COUNTED else total / len(steps) for name, total in sums.items()}
    return means | {name: last[name] for name in LAST_VALUE if name in last} | {"steps": float(len(steps))}


def _sample_cost(args: Args) -> Cost:
    """Forward FLOPs by number of tokens when a balancing switch asks for them."""
    if not (args.balance_data or args.balance_by_flops):
        return float
    config = load_model_config(args.hf_checkpoint)
    shape = DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    return shape.forward_flops
