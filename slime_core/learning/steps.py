"""The optimizer steps of one rollout on one trainer, watched: a loss or gradient that is not finite ends the run.

Called by the learner for the actor and for the critic. A gradient norm that is not finite raises only where the trainer
changed the weights all the same; with `skipped_steps` 1 it left them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from slime_core.errors import TrainError, rollout_name
from slime_core.learning.packing import RankSchedule
from slime_core.protocols import LossFn, MicroBatchOutput, StepResult, Trainer
from slime_core.sample import TrainBatch


def take_steps(
    trainer: Trainer,
    local: TrainBatch,
    share: RankSchedule,
    loss_of_step: Callable[[int], LossFn],
    *,
    with_entropy: bool = False,
    with_logits: bool = False,
) -> list[StepResult]:
    """The result of each step.

    Args:
        trainer: Of the actor or the critic.
        local: This rank's samples.
        share: Its part of the schedule.
        loss_of_step: Number of the step -> its loss function.
        with_entropy: See `protocols.Trainer.train_step`.
        with_logits: Likewise.

    Raises:
        TrainError: A loss or gradient is not finite.
    """
    results = []
    for number, micro_batches in enumerate(share.steps):
        loss_fn = _checked(loss_of_step(number), local)
        found = trainer.train_step(local, micro_batches, loss_fn, with_entropy=with_entropy, with_logits=with_logits)
        norm = found.metrics.get("grad_norm", 0.0)
        if not math.isfinite(norm) and not found.metrics.get("skipped_steps"):
            raise TrainError(f"{rollout_name(local.rollout_id)}, optimizer step {number}: gradient norm {norm}")
        results.append(found)
    return results


def over_steps(results: Sequence[StepResult]) -> dict[str, float]:
    """Mean of each metric over the steps, but for `lr`, which is the last one, and `skipped_steps`, their number."""
    sums = {name: sum(result.metrics[name] for result in results) for name in results[-1].metrics}
    means = {name: total / (1 if name == "skipped_steps" else len(results)) for name, total in sums.items()}
    return means | ({"lr": results[-1].metrics["lr"]} if "lr" in sums else {})


def _checked(loss_fn: LossFn, local: TrainBatch) -> LossFn:
    """The same function; raises before a backward pass from a loss that is NaN or infinite."""

    def checked(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = loss_fn(output)
        if not torch.isfinite(loss.detach()):
            raise TrainError(_complaint(loss.item(), output, local))
        return loss, metrics

    return checked


def _complaint(loss: float, output: MicroBatchOutput, local: TrainBatch) -> str:
    samples = [local.sample_indices[p] for p in output.positions]
    what, values = ("log-probs", output.log_probs) if output.values is None else ("values", output.values)
    bad = int((~torch.isfinite(values.detach())).sum())
    return (
        f"{rollout_name(local.rollout_id)}: the loss of a micro-batch is {loss} (samples {samples[:16]}; {bad} of"
        f" {values.numel()} {what} not finite)"
    )
