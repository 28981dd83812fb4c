"""The training loop: start reading here.

    prompts -> rollout -> reward -> filter -> buffer -> batch   stages.rollout  (slime_core/rollout/stage.py)
            -> advantages -> loss -> optimizer                  stages.learner  (slime_core/learning/learner.py)
            -> weight sync                                      stages.weights  (slime_core/weights/sync.py)
            -> metrics, checkpoint                              stages.journal  (slime_core/launch/journal.py)

A launcher (`slime_core/launch`) builds the stages and decides where each one lives; the loop cannot tell. `step`
counts finished rollouts: metrics of rollout r are logged at step r + 1, an evaluation before training at step 0.
With `--offload`, learner and weights also see to it that either the trainer or the engines have the devices' memory
(`slime_core/launch/offload.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_core.errors import RolloutInterrupted
from slime_core.protocols import Args
from slime_core.types import TrainBatch


class Rollout(Protocol):
    """The generation side."""

    def generate(self, rollout_id: int) -> Any:
        """-> object with `.batch: TrainBatch` and `.metrics`. Raises RolloutInterrupted when the run is to end."""

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """`eval/...` metrics. Raises RolloutInterrupted when the run is to end."""


class Learning(Protocol):
    """The training side."""

    def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of one rollout."""


class Weights(Protocol):
    """Trained parameters -> engines."""

    def push(self) -> dict[str, float]:
        """Make the engines serve the newest weights."""


class Journal(Protocol):
    """What is recorded: metrics, checkpoints, hooks."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics under `step` finished rollouts."""

    def step_end(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """A rollout has been trained on."""

    def save(self, rollout_id: int) -> None:
        """Commit a checkpoint."""


@dataclass
class Stages:
    """The parts of a run."""

    rollout: Rollout
    learner: Learning
    weights: Weights
    journal: Journal
    unfinished: list[int] = field(default_factory=list)
    """Step of an evaluation that the run's end interrupted; none or one. The commit remembers it, and a resumed run
    gives it in here to have it done first."""


def train(args: Args, stages: Stages, start: int) -> int:
    """Run rollouts `start` to `args.num_rollout`; returns how many are done, fewer when the run was to end early."""
    stages.weights.push()
    if start == 0 and args.eval_interval and not args.skip_eval_before_train:
        stages.unfinished[:] = [0]
    for step in list(stages.unfinished):
        metrics = _evaluate(stages, step)
        if stages.unfinished:
            return start
        stages.journal.log(step, metrics)
    saved = None
    for rollout_id in range(start, args.num_rollout):
        try:
            rollout = stages.rollout.generate(rollout_id)
        except RolloutInterrupted as interrupted:
            # What is given back changes the data cursor, so the commit of the last step is made again.
            if rollout_id > 0 and (interrupted.drew or saved != rollout_id - 1):
                stages.journal.save(rollout_id - 1)
            return rollout_id
        metrics = {**rollout.metrics, **stages.learner.train(rollout_id, rollout.batch)}
        metrics |= stages.weights.push()
        if is_due(args.eval_interval, rollout_id, args.num_rollout):
            metrics |= _evaluate(stages, rollout_id + 1)
        stages.journal.step_end(rollout_id, metrics)
        if stages.unfinished or saves_after(args, rollout_id):
            stages.journal.save(rollout_id)
            saved = rollout_id
        if stages.unfinished:
            return rollout_id + 1
    return int(max(start, args.num_rollout))


def _evaluate(stages: Stages, step: int) -> dict[str, float]:
    """Metrics of the weights after `step` rollouts; when the run is to end none, and `stages.unfinished` says so."""
    stages.unfinished[:] = [step]
    try:
        metrics = stages.rollout.evaluate(max(step - 1, 0))
    except RolloutInterrupted:
        return {}
    stages.unfinished.clear()
    return metrics


def is_due(interval: int | None, rollout_id: int, num_rollout: int) -> bool:
    """Every `interval` rollouts and after the last one; never without an interval."""
    return bool(interval) and ((rollout_id + 1) % interval == 0 or rollout_id + 1 == num_rollout)  # type: ignore[operator]


def saves_after(args: Args, rollout_id: int) -> bool:
    """Every `--save-interval` rollouts, and after the last one in any case: nobody trains weights to lose them."""
    return rollout_id + 1 == args.num_rollout or is_due(args.save_interval, rollout_id, args.num_rollout)
