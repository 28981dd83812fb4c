"""The training of one rollout: `TrainBatch` -> optimizer steps -> metrics, on one data-parallel rank.

The loop calls it with the whole batch on every rank. Each rank computes the same schedule and takes its share: first
the forward passes (`learning/passes.py`), then the critic's steps, if the estimator needs values, then the actor's
(`learning/packing.py`). The critic's update does not change this rollout's advantages, which use its earlier values.

Metrics: `train/*` are means over the rollout's optimizer steps (`train/lr`: the last one;
`train/skipped_steps`: their number), `train/critic-*` the critic's likewise, `rollout/*` describe the
data before the update (`learning/report.py`). `train/train_rollout_logprob_abs_diff` compares the trainer's log-probs
before the update with the engine's (with `--use-rollout-logprobs` on the first step's samples only). Rollouts that
train the critic only (`--num-critic-only-steps`) have no `train/*` of the actor.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slime_core.errors import ConfigError, TrainError, rollout_name
from slime_core.learning.loss import Loss, value_loss
from slime_core.learning.packing import (
    Cost,
    PackingPolicy,
    RankSchedule,
    Schedule,
    build_schedule,
    over_steps,
    take_steps,
)
from slime_core.learning.passes import Clock, DataPostprocess, Passes
from slime_core.learning.report import TrainedRollout, log_prob_gap, rollout_report, save_trained
from slime_core.learning.tensors import Denominators, TrainTensors
from slime_core.models.family import RoutedLayers, decoder_shape, routed_layers
from slime_core.protocols import AdvantageEstimator, Args, LossFn, StepResult, Trainer, TrainerTraits, traits_of
from slime_core.sample import TrainBatch
from slime_core.sample.routed_experts import FREE, RoutedExperts
from slime_core.waits import named

logger = logging.getLogger(__name__)

_SMALL_PASS = 512
"""Number of tokens below which the fixed cost of a pass dominates."""


class Learner:
    """Drives the trainers through the optimizer steps of each rollout.

    Args:
        args: The run's settings.
        trainer: This rank's trainer of the actor.
        estimator: None for losses that need no advantages.
        loss: The objective of the actor.
        critic: This rank's trainer of the critic, where the estimator `needs_values`.
        postprocess: Calls the hook `slime_train_data`.
        on_trained: Calls the hook `slime_rollout_trained`.

    Raises:
        ConfigError: The loss needs advantages but nothing may compute them.
    """

    def __init__(
        self,
        args: Args,
        trainer: Trainer,
        estimator: AdvantageEstimator | None,
        loss: Loss,
        *,
        critic: Trainer | None = None,
        postprocess: DataPostprocess | None = None,
        on_trained: DataPostprocess | None = None,
    ) -> None:
        if loss.needs_advantages and (estimator is None or not args.compute_advantages_and_returns):
            raise ConfigError(
                f"--loss-type {args.loss_type} needs advantages; drop --disable-compute-advantages-and-returns or"
                " choose a loss without them, such as sft_loss"
            )
        self.args = args
        self.trainer = trainer
        self.loss = loss
        self.critic = critic
        self._on_trained = on_trained
        self._passes = Passes(args, trainer, loss, estimator, critic, postprocess)
        self._cost = _sample_cost(args, trainer)
        self._warned = False

    @named("optimizer steps of {0}", deadline="train_timeout", then="the process ends (--train-timeout)", stop=True)
    def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """Take the rollout's optimizer steps.

        Args:
            rollout_id: Id of the rollout, counted from 0.
            batch: All samples of the rollout, the same on every rank.

        Returns:
            Metrics, equal on every rank except `perf/*`, and except `train/update_ratio` if the model is split.

        Raises:
            TrainError: Nothing to train on, a column is missing, or a loss or gradient is not finite.
        """
        if not any(map(any, batch.loss_masks)):
            raise TrainError(
                f"{rollout_name(rollout_id)}: every response token of all {len(batch)} samples is masked; nothing to"
                " train on. Look for failed or removed samples and for filters or loss masks that are too strict"
            )
        if batch.multimodal_train_inputs is not None and not traits_of(self.trainer, TrainerTraits).takes_images:
            raise TrainError(
                f"{rollout_name(rollout_id)}: its samples have images, which {type(self.trainer).__name__} does not"
                " take; type --train-backend embedded"
            )
        schedule = build_schedule(batch, self._policy(), self._cost)
        share = schedule.for_rank(self.trainer.rank)
        local = replace(batch.select(share.indices), rollout_id=rollout_id)
        if self.args.use_routing_replay:
            local.routed_experts = routing_arrays(local, routed_layers(self.args.hf_checkpoint, self.trainer))
        self._warn_of_small_passes(local, share)
        clock, steps = Clock(), list[StepResult]()
        trains_actor = self.critic is None or rollout_id >= self.args.num_critic_only_steps
        denominators = self._denominators(batch, schedule, share)
        tensors = self._passes.run(local, share, denominators, clock, trains_actor=trains_actor)
        metrics: dict[str, float] = {}
        if self.critic is not None:
            with clock.timed("critic_train"):
                metrics |= _prefixed("train/critic-", self._train_critic(local, tensors, share, denominators))
        if trains_actor:
            before = self._probes()
            with clock.timed("actor_train"):
                steps = self._train_actor(local, tensors, share, denominators)
            metrics |= _prefixed("train/", {**over_steps(steps), "steps": float(len(steps))})
            if before is not None and (after := self._probes()) is not None:
                moved, size = self.trainer.all_reduce(torch.stack([(after - before).norm() ** 2, before.norm() ** 2]))
                metrics["train/update_ratio"] = math.sqrt(moved / max(size, 1e-30)) / len(steps)
        metrics |= self._describe(batch, local, tensors, steps, share, clock)
        if self.args.ref_update_interval and (rollout_id + 1) % self.args.ref_update_interval == 0:
            self.trainer.update_reference()
        return metrics | clock.metrics()

    def _probes(self) -> torch.Tensor | None:
        """Return copies of some trained weights, if the trainer has `weight_probes`."""
        return self.trainer.weight_probes().double() if hasattr(self.trainer, "weight_probes") else None

    def _warn_of_small_passes(self, local: TrainBatch, share: RankSchedule) -> None:
        """Warn once if passes are so small that their fixed cost dominates."""
        passes, tokens = sum(map(len, share.steps)), sum(map(len, local.tokens))
        if self._warned or self.args.use_dynamic_batch_size or passes < 8 or tokens >= _SMALL_PASS * passes:
            return
        self._warned = True
        logger.warning(
            "%s: --micro-batch-size %d makes %d passes of %d tokens on average, which take several times as"
            " long as full ones; leave it out, or type --use-dynamic-batch-size --max-tokens-per-gpu N",
            *(rollout_name(local.rollout_id), self.args.micro_batch_size, passes, tokens // passes),
        )

    # -- the steps -----------------------------------------------------------------------------------

    def _policy(self) -> PackingPolicy:
        """Return the packing of micro-batches that suits actor and critic."""
        trainers = [trainer for trainer in (self.trainer, self.critic) if trainer is not None]
        return PackingPolicy.from_args(
            self.args,
            self.trainer.world_size,
            multiple=math.lcm(*(getattr(trainer, "micro_batch_multiple", 1) for trainer in trainers)),
            context_parallel_size=min(getattr(trainer, "context_parallel_size", 1) for trainer in trainers),
        )

    def _denominators(self, batch: TrainBatch, schedule: Schedule, share: RankSchedule) -> list[Denominators]:
        """Return the denominators of each optimizer step."""
        per_token = self.args.calculate_per_token_loss
        return [
            replace(
                Denominators.of(batch, step.samples, per_token=per_token),
                positions=tuple(p for micro_batch in micro_batches for p in micro_batch),
                all_reduce=self.trainer.all_reduce,
            )
            for step, micro_batches in zip(schedule.steps, share.steps)
        ]

    def _train_critic(
        self, local: TrainBatch, tensors: TrainTensors, share: RankSchedule, denominators: list[Denominators]
    ) -> dict[str, float]:
        assert self.critic is not None
        return over_steps(
            take_steps(self.critic, local, share, lambda n: value_loss(self.args, local, tensors, denominators[n]))
        )

    def _train_actor(
        self,
        local: TrainBatch,
        tensors: TrainTensors,
        share: RankSchedule,
        denominators: list[Denominators],
    ) -> list[StepResult]:
        def loss_of_step(number: int) -> LossFn:
            own = number == 0 and self._passes.reuses_own_log_probs
            return self.loss.bind(local, replace(tensors, old_log_probs=None) if own else tensors, denominators[number])

        with_entropy, with_logits = self.loss.needs_entropy, self.loss.needs_logits
        return take_steps(self.trainer, local, share, loss_of_step, with_entropy=with_entropy, with_logits=with_logits)

    # -- after the steps -----------------------------------------------------------------------------

    def _describe(
        self,
        batch: TrainBatch,
        local: TrainBatch,
        tensors: TrainTensors,
        steps: list[StepResult],
        share: RankSchedule,
        clock: Clock,
    ) -> dict[str, float]:
        # The trainer's own log-probs before the update, by position.
        own = tensors.train_log_probs if self.args.use_rollout_logprobs else tensors.old_log_probs
        known = {p: part for p, part in enumerate(own or ()) if len(part) == local.response_lengths[p]}
        if steps and (not known or self._passes.reuses_own_log_probs):
            known |= steps[0].log_probs  # the first step's log-probs predate the update
        trained = TrainedRollout(self.trainer, batch, local, share.indices, tensors, steps, known, clock.spans)
        metrics = rollout_report(batch, local, tensors, trained.log_probs, self.trainer)
        if tensors.rollout_log_probs is not None and known:
            metrics |= log_prob_gap(tensors, known, self.trainer)
        if self._on_trained is not None:
            self._on_trained(args=self.args, trained=trained)
        if self.args.save_debug_train_data:
            save_trained(self.args.save_debug_train_data, trained)
        return metrics


def _prefixed(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def _sample_cost(args: Args, trainer: Trainer) -> Cost:
    """Return forward FLOPs by number of tokens, if a balancing option needs them."""
    if not (args.balance_data or args.balance_by_flops):
        return float
    return decoder_shape(args.hf_checkpoint, trainer).forward_flops


def routing_arrays(batch: TrainBatch, model: RoutedLayers) -> list[np.ndarray]:
    """Return [n] new int32 arrays [len(tokens) - 1, layers, top_k]; unknown entries are `FREE`.

    A layer's row that names an expert twice counts as unknown: engines leave zeros where they did not route.

    Raises:
        TrainError: The experts do not fit this model.
    """
    rows = batch.routed_experts or [None] * len(batch)
    return [_array(batch, i, value, model) for i, value in enumerate(rows)]


def _array(batch: TrainBatch, position: int, value: Any, model: RoutedLayers) -> np.ndarray:
    shape = (len(batch.tokens[position]) - 1, model.num_layers, model.experts_per_token)
    result = np.full(shape, FREE, dtype=np.int32)
    if value is None:
        return result
    given = np.asarray(RoutedExperts.of(value))
    layers = list(model.layers)
    if given.shape != shape or given[:, layers].max(initial=FREE) >= model.num_experts:
        raise TrainError(
            f"sample {batch.sample_indices[position]} of {rollout_name(batch.rollout_id)}: routed experts of shape"
            f" {given.shape}, up to number {given.max(initial=FREE)}; this model has {shape[1]} layers and"
            f" {model.experts_per_token} of {model.num_experts} experts per token, and the sample {shape[0] + 1}"
            " tokens. Do engine and trainer serve the same --hf-checkpoint?"
        )
    chosen = np.sort(given[:, layers], axis=-1)
    whole = (chosen[..., 0] >= 0) & (np.diff(chosen, axis=-1) > 0).all(axis=-1)
    result[:, layers] = np.where(whole[..., None], given[:, layers], FREE)
    return result
