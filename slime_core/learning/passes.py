"""The forward passes of a rollout before its optimizer steps, which compute log-probs, values and advantages.

Called by the learner once per rollout, on every rank. The "old" log-probs have several sources. Samples of the first
optimizer step use that step's own log-probs, detached, which costs no extra pass. Log-probs of later steps' samples are
recomputed here. Estimators that need log-probs beforehand (KL in the reward, `needs_log_probs`), distillation,
`--use-rollout-entropy`, the hook `slime_train_data` and `--use-routing-replay` (without the engine's routing) get
recomputed log-probs of all samples. With `--use-rollout-logprobs` the old log-probs are the engine's. With
`--keep-old-actor` they come from the weights that were served last. Off-policy corrections take recomputed log-probs of
all samples, or none (`--proximal-policy interpolate`).

Advantages follow from them: shaped rewards, log-probs and values -> advantages and returns, through the estimator, on
every rank (whitening talks to the others). The KL here is between the policy at the start of the update and the
reference, and reaches the reward only through estimators that use it; the KL in the loss is another term
(`learning/loss.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from slime_core.errors import TrainError, rollout_name
from slime_core.learning.loss import Loss
from slime_core.learning.packing import RankSchedule
from slime_core.learning.tensors import Column, Denominators, TrainTensors
from slime_core.ops.masking import AllReduce, masked, masked_whiten
from slime_core.ops.ratios import kl_estimate
from slime_core.protocols import AdvantageEstimator, AdvantageInputs, Args, Trainer
from slime_core.sample import TrainBatch

DataPostprocess = Callable[..., object]
"""Caller of the hook `slime_train_data`: (*, args, rollout_id, rollout_data), which may change the data in place."""


@dataclass
class Passes:
    """The forward passes and advantages computed before the update, and the objects that compute them."""

    args: Args
    trainer: Trainer
    loss: Loss
    estimator: AdvantageEstimator | None = None
    """Advantage estimator; None for losses that need no advantages."""
    critic: Trainer | None = None
    postprocess: DataPostprocess | None = None

    @property
    def reuses_own_log_probs(self) -> bool:
        """True if the first step's policy is its own old policy."""
        return bool(self.loss.needs_advantages) and not self.args.use_rollout_logprobs and not self._needs_own_log_probs

    @property
    def _takes_engines_log_probs(self) -> bool:
        return self.args.use_rollout_logprobs and bool(self.loss.needs_advantages)

    @property
    def _needs_own_log_probs(self) -> bool:
        """True if the trainer's log-probs of all samples are needed before the first step."""
        args, old_policy = self.args, self.loss.old_policy
        if not self.loss.needs_advantages:
            return bool(args.use_rollout_entropy)
        if args.use_routing_replay and not args.use_rollout_routing_replay:
            return True  # the pass records the routing that the steps replay
        if args.keep_old_actor:
            return True
        if args.use_rollout_entropy or args.true_on_policy_mode or old_policy == "recomputed":
            return True
        if self._takes_engines_log_probs:
            return False
        assert self.estimator is not None
        for_advantages = self.estimator.needs_log_probs or bool(args.kl_coef) or args.use_opd
        return for_advantages or self.postprocess is not None

    def run(
        self,
        local: TrainBatch,
        share: RankSchedule,
        steps: Sequence[Denominators],
        clock: Clock,
        *,
        trains_actor: bool = True,
    ) -> TrainTensors:
        """Run the passes and return this rank's samples as tensors, with all inputs of the loss.

        Args:
            local: This rank's samples.
            share: This rank's part of the schedule.
            steps: The samples over which each optimizer step sums.
            clock: Times each pass.
            trains_actor: False when the rollout trains the critic only; passes that only the actor's later steps
                would read are left out.

        Raises:
            TrainError: The samples lack a column, or a result has the wrong shape.
        """
        tensors = TrainTensors.from_batch(local, self.trainer.device)
        micro_batches = [micro_batch for step in share.steps for micro_batch in step]
        self._old_log_probs(local, micro_batches, tensors, clock)
        if self.args.true_on_policy_mode:
            _check_same_bits(local, tensors)
        if self.loss.needs_advantages:
            self._other_models(local, micro_batches, tensors, clock)
            assert self.estimator is not None
            kept = self.loss.kept(local, tensors, steps) if self.args.normalize_advantages else None
            tensors = compute_advantages(self.args, local, tensors, self.estimator, self.trainer.all_reduce, kept)
            reads_later = trains_actor and len(share.steps) > 1 and self.loss.old_policy != "interpolated"
            if tensors.old_log_probs is None and reads_later:
                with clock.timed("log_probs"):
                    tensors.old_log_probs = self._later_log_probs(local, share)
        if self.postprocess is not None:
            from slime_core.learning.rollout_data import rollout_data, taken_over

            data = rollout_data(local, tensors)
            self.postprocess(args=self.args, rollout_id=local.rollout_id, rollout_data=data)
            where = f"slime_train_data (--rollout-data-postprocess-path), {rollout_name(local.rollout_id)}"
            tensors = taken_over(data, tensors, where)
        return tensors

    def _old_log_probs(
        self, local: TrainBatch, micro_batches: list[list[int]], tensors: TrainTensors, clock: Clock
    ) -> None:
        own: Column | None = None
        with clock.timed("log_probs") if self._needs_own_log_probs else nullcontext():
            if self.args.use_rollout_entropy:
                own, tensors.entropy = self.trainer.log_probs_and_entropy(local, micro_batches)
            if self.args.keep_old_actor and self.loss.needs_advantages:
                own = self.trainer.log_probs(local, micro_batches, role="old_actor")
            elif self._needs_own_log_probs and own is None:
                own = self.trainer.log_probs(local, micro_batches, role="actor")
        if self._takes_engines_log_probs:
            if tensors.rollout_log_probs is None:
                raise TrainError(
                    f"{rollout_name(local.rollout_id)}: --use-rollout-logprobs, but the samples carry no"
                    " rollout_log_probs; the generate function must record them"
                )
            tensors.old_log_probs, tensors.train_log_probs = tensors.rollout_log_probs, own
        else:
            tensors.old_log_probs = own

    def _other_models(
        self, local: TrainBatch, micro_batches: list[list[int]], tensors: TrainTensors, clock: Clock
    ) -> None:
        """Compute the log-probs of reference and teacher and the values of the critic."""
        args = self.args
        if args.kl_coef or args.use_kl_loss:
            with clock.timed("ref_log_probs"):
                tensors.ref_log_probs = self.trainer.log_probs(local, micro_batches, role="ref")
        if args.use_opd and (args.opd_teacher_load or args.opd_type == "self"):
            with clock.timed("teacher_log_probs"):
                tensors.teacher_log_probs = self.loss.teacher_log_probs(
                    self.trainer,
                    *_as_the_teacher_sees(local, micro_batches),
                    role="teacher" if args.opd_teacher_load else "actor",
                )
        if args.use_opd and tensors.teacher_log_probs is None:
            raise TrainError(
                f"{rollout_name(local.rollout_id)}: --use-opd --opd-type {args.opd_type}, but the samples carry no"
                " teacher_log_probs; type --custom-rm-path on_policy_distillation --rm-url URL, or set them in a reward"
                " or generate function"
            )
        if self.critic is not None:
            with clock.timed("values"):
                tensors.values = self.critic.values(local, micro_batches)

    def _later_log_probs(self, local: TrainBatch, share: RankSchedule) -> Column:
        """Return the log-probs of all samples after the first step's.

        The first step's samples come first in the local batch and get empty tensors.
        """
        first = sum(map(len, share.steps[0]))
        micro_batches = [[p - first for p in micro_batch] for step in share.steps[1:] for micro_batch in step]
        later = local.select(range(first, len(local)))
        found = self.trainer.log_probs(later, micro_batches, role="actor")
        return [torch.zeros(0, device=self.trainer.device)] * first + found


def _as_the_teacher_sees(local: TrainBatch, micro_batches: list[list[int]]) -> tuple[TrainBatch, list[list[int]]]:
    """Return the samples with the teacher's prompts, token ids in `train_metadata["teacher_prompt"]`.

    Prompts may be of any length, so each sample is a micro-batch of its own if any has one.
    """
    prompts = [(given or {}).get("teacher_prompt") for given in local.train_metadata or ()]
    if not any(prompts):
        return local, micro_batches
    rows = zip(prompts, local.tokens, local.response_lengths)
    tokens = [row if not prompt else [*prompt, *row[-length:]] for prompt, row, length in rows]
    # Experts were recorded for other tokens.
    return replace(local, tokens=tokens, routed_experts=None), [[p] for each in micro_batches for p in each]


def _check_same_bits(local: TrainBatch, tensors: TrainTensors) -> None:
    """Check for `--true-on-policy-mode` that engine and trainer log-probs of all trained tokens are the same bits.

    Raises:
        TrainError: The log-probs differ, or the samples have no engine log-probs.
    """
    own = tensors.old_log_probs if tensors.train_log_probs is None else tensors.train_log_probs
    assert own is not None, "the pass before computed them"
    if tensors.rollout_log_probs is None:
        raise TrainError(
            f"{rollout_name(local.rollout_id)}: --true-on-policy-mode, but the samples carry no rollout_log_probs; the"
            " generate function must record them"
        )
    for i, (trained, sampled, mask) in enumerate(zip(own, tensors.rollout_log_probs, tensors.loss_masks)):
        different = ((trained != sampled) & (mask > 0)).nonzero().flatten().tolist()
        if different:
            at = different[0]
            raise TrainError(
                f"{rollout_name(local.rollout_id)}, --true-on-policy-mode: sample {local.sample_indices[i]} has"
                f" {len(different)} of {int((mask > 0).sum())} tokens whose log-prob is not the engine's; the first is"
                f" response token {at}, {trained[at].item()!r} here and {sampled[at].item()!r} there. Its tokens were"
                " changed after sampling, sampled with other settings or weights, or this machine's matrix products"
                " depend on their place in a batch"
            )


class Clock:
    """A clock that adds up wall time by name, for the passes here and the learner's steps."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        """Name, start and end of each span, by `time.perf_counter`."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block under `name`; add nothing if it raises."""
        started = time.perf_counter()
        yield
        self.spans.append((name, started, time.perf_counter()))

    def metrics(self) -> dict[str, float]:
        """Return `perf/<name>_time` for each name, in seconds."""
        found: dict[str, float] = {}
        for name, started, ended in self.spans:
            found[f"perf/{name}_time"] = found.get(f"perf/{name}_time", 0.0) + ended - started
        return found


_AS_THEY_ARE = ("loss_masks", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "values")


def compute_advantages(
    args: Args,
    batch: TrainBatch,
    tensors: TrainTensors,
    estimator: AdvantageEstimator,
    all_reduce: AllReduce,
    kept: Column | None = None,
) -> TrainTensors:
    """Fill in `kl`, `advantages` and `returns`, and with `use_opd` also `opd_reverse_kl`.

    Distillation (Agarwal et al., 2023; as a per-token reward: Thinking Machines, "On-Policy Distillation", 2025) goes
    on top of any estimator: A_t -= opd_kl_coef * (log p_old - log p_teacher), before whitening.

    Args:
        args: With `kl_coef` the KL is estimated (`kl_loss_type`), else it is zero; `normalize_advantages` whitens over
            all ranks.
        batch: The rank's local batch.
        tensors: Its columns.
        estimator: The algorithm.
        all_reduce: Sum over data-parallel ranks.
        kept: The loss masks without what a correction rejects, which whitening leaves out; None: nothing is rejected.

    Raises:
        TrainError: The estimator returned tensors of other shapes.
    """
    kl = _kl(args, tensors)
    device = tensors.loss_masks[0].device if tensors.loss_masks else torch.device("cpu")
    result = estimator.advantages(
        args,
        AdvantageInputs(
            rewards=torch.tensor(batch.rewards, dtype=torch.float32, device=device),
            response_lengths=batch.response_lengths,
            group_indices=batch.group_indices,
            rollout_ids=batch.rollout_ids,
            kl=kl,
            log_probs=tensors.old_log_probs,
            components=batch.components,
            turns=batch.turns,
            turn_rewards=batch.turn_rewards,
            rollout_data=batch.to_rollout_data(),
            **{name: getattr(tensors, name) for name in _AS_THEY_ARE},
        ),
    )
    advantages = _checked("advantages", result.advantages, batch, estimator)
    returns = _checked("returns", result.returns, batch, estimator)
    reverse_kl = _reverse_kl(tensors) if args.use_opd else None
    if reverse_kl is not None:
        advantages = [part - args.opd_kl_coef * gap for part, gap in zip(advantages, reverse_kl)]
    if args.normalize_advantages:
        advantages = _whiten(advantages, tensors.loss_masks if kept is None else kept, all_reduce)
    return replace(tensors, kl=kl, opd_reverse_kl=reverse_kl, advantages=advantages, returns=returns)


def _kl(args: Args, tensors: TrainTensors) -> Column:
    if not args.kl_coef or tensors.ref_log_probs is None or tensors.old_log_probs is None:
        return [torch.zeros_like(mask) for mask in tensors.loss_masks]
    pairs = zip(tensors.old_log_probs, tensors.ref_log_probs)
    return [kl_estimate(old, ref, args.kl_loss_type) for old, ref in pairs]


def _reverse_kl(tensors: TrainTensors) -> Column:
    assert tensors.old_log_probs is not None, "the learner computes old log-probs under use_opd"
    assert tensors.teacher_log_probs is not None, "the learner checks for a teacher under use_opd"
    triples = zip(tensors.old_log_probs, tensors.teacher_log_probs, tensors.loss_masks)
    return [masked(old - teacher, mask) for old, teacher, mask in triples]


def _checked(name: str, parts: Column, batch: TrainBatch, estimator: AdvantageEstimator) -> Column:
    shapes = [tuple(part.shape) for part in parts]
    if shapes != [(length,) for length in batch.response_lengths]:
        raise TrainError(
            f"{type(estimator).__name__}.advantages returned {name} of shapes {shapes[:8]}; expected one tensor per"
            f" sample with response lengths {batch.response_lengths[:8]}"
        )
    return parts


def _whiten(advantages: Column, masks: Column, all_reduce: AllReduce) -> Column:
    # A rank without samples still takes part in the two reductions.
    flat = torch.cat(advantages) if advantages else torch.zeros(0)
    mask = torch.cat(masks) if masks else torch.zeros(0)
    try:
        white = masked_whiten(flat, mask, all_reduce)
    except ValueError:  # nothing is left on any rank, so that no advantage counts
        return advantages
    return list(torch.split(white, [len(part) for part in advantages]))
