"""Stand-ins for the rollout stage when several trainer processes share one: rank 0 generates, the others receive.

All ranks run the same loop; the batch travels from rank 0 as JSON over the trainer's process group::

    rank 0   SendingRollout(RolloutStage)  --batch, metrics-->  ReceivingRollout   ranks 1..n-1
             WeightSync                    --see collective-->  weights.collective.FollowingWeights
             Journal, save_together        --directory------->  FollowingJournal

While rank 0 works alone, on a rollout, an evaluation or the start of the engines, the others wait in a collective call
that has a deadline (`--distributed-timeout-minutes`). Rank 0 says several times within it that it is still at work, so
the deadline is that of a process that hangs or is gone, and a rollout may take as long as it takes. What a reader would
get wrong: this is about processes, of which several may be one data-parallel rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import orjson

from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.launch.process import num_processes
from slime_core.launch.trainers import Trainers
from slime_core.protocols import Trainer
from slime_core.rollout.stage import RolloutResult, RolloutStage
from slime_core.routed_experts import json_default
from slime_core.types import TrainBatch
from slime_core.waits import waiting

T = TypeVar("T")
_AT_WORK = {"at_work": True}
_WORDS_PER_DEADLINE = 4


class SendingRollout:
    """Rank 0: the real stage, whose results also go to the other ranks.

    Args:
        stage: What generates.
        trainer: Has the connection to the others.
        deadline_minutes: Of their wait: `--distributed-timeout-minutes`.
    """

    def __init__(self, stage: RolloutStage, trainer: Trainer, deadline_minutes: float) -> None:
        self._stage = stage
        self._trainer = trainer
        self._period = deadline_minutes * 60 / _WORDS_PER_DEADLINE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def start(self) -> None:
        """Bring the engines up."""
        self._alone(self._stage.start, lambda _: {})

    def generate(self, rollout_id: int) -> RolloutResult:
        """Generate and send."""
        return self._alone(
            lambda: self._stage.generate(rollout_id),
            lambda result: {"batch": asdict(result.batch), "metrics": result.metrics},
        )

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """`eval/...` metrics."""
        return self._alone(lambda: self._stage.evaluate(rollout_id), lambda _: {})

    def release_memory(self) -> None:
        """Of the engine; the others begin to train after it."""
        self._alone(self._stage.release_memory, lambda _: {})

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Of the engine."""
        self._alone(lambda: self._stage.resume_memory(tags), lambda _: {})

    def _alone(self, work: Callable[[], T], message: Callable[[T], dict[str, Any]]) -> T:
        """Do what the others wait for, and tell them what came of it: a failure too, so that nobody waits in vain.

        An interrupt is not told: it ends all ranks, and a broadcast to one that is ending may hang.
        """
        try:
            with _telling(self._trainer, self._period):
                result = work()
        except RolloutInterrupted as interrupted:
            self._trainer.broadcast(orjson.dumps({"interrupted": interrupted.drew}))
            raise
        except Exception as error:
            self._trainer.broadcast(orjson.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        self._trainer.broadcast(orjson.dumps(message(result), default=json_default))
        return result


@contextmanager
def _telling(trainer: Trainer, period: float) -> Iterator[None]:
    """Tell the others every `period` seconds that this process is at work; nothing else uses the trainer meanwhile.

    Raises:
        RolloutError: They could not be told.
    """
    done, problems = threading.Event(), list[Exception]()

    def tell() -> None:
        while not done.wait(period):
            try:
                trainer.broadcast(orjson.dumps(_AT_WORK))
            except Exception as error:
                problems.append(error)
                return

    thread = threading.Thread(target=tell, name="tells the other ranks", daemon=True)
    thread.start()
    try:
        yield
    except Exception:
        done.set()
        with waiting("the thread that tells other ranks", deadline=None, then="--distributed-timeout-minutes ends it"):
            thread.join()
        raise
    finally:
        done.set()  # an interrupt waits for nobody: the thread may be stuck at a rank that is ending
    with waiting("the thread that tells other ranks", deadline=None, then="--distributed-timeout-minutes ends it"):
        thread.join()
    if problems:
        raise RolloutError(f"another training process has ended, or hangs: {problems[0]}") from problems[0]


class ReceivingRollout:
    """Ranks 1..n-1: receives what rank 0 generated. All of it raises RolloutError when rank 0 failed."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def start(self) -> None:
        """Wait until rank 0's engines are up."""
        self._wait("the start of the engines")

    def generate(self, rollout_id: int) -> RolloutResult:
        """Wait for rank 0's batch. Raises RolloutInterrupted where rank 0 does."""
        message = self._wait(f"rollout {rollout_id}")
        self._check_goes_on(message)
        return RolloutResult(TrainBatch(**message["batch"]), message["metrics"])

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Wait while rank 0 evaluates. Raises RolloutInterrupted where rank 0 does."""
        self._check_goes_on(self._wait(f"the evaluation after rollout {rollout_id}"))
        return {}

    def release_memory(self) -> None:
        """Wait until rank 0's engines have."""
        self._wait("releasing the engines' memory")

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Wait until rank 0's engines have."""
        self._wait("taking the engines' memory again")

    def _check_goes_on(self, message: dict[str, Any]) -> None:
        if "interrupted" in message:
            raise RolloutInterrupted(message["interrupted"])

    def _wait(self, what: str) -> dict[str, Any]:
        """The next message that is more than a sign of life; each must come within the process group's deadline."""
        message: dict[str, Any] = _AT_WORK
        while message == _AT_WORK:
            with waiting(f"rank 0, at work on {what}", deadline=None, then="--distributed-timeout-minutes ends it"):
                message = orjson.loads(self._trainer.broadcast(None))
        if "error" in message:
            raise RolloutError(f"{what} failed on rank 0: {message['error']}")
        return message


def save_together(trainers: Trainers, directory: Path) -> None:
    """Rank 0: tell the others where the commit is being built, then save with them."""
    if num_processes() > 1:
        trainers.broadcast(str(directory).encode())
    trainers.save(directory)


class FollowingJournal:
    """Ranks 1..n-1: add this rank's part to rank 0's checkpoints and record nothing else."""

    def __init__(self, trainers: Trainers) -> None:
        self._trainers = trainers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 logs."""

    def step_end(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 tells the hooks."""

    def save(self, rollout_id: int) -> None:
        """Wait for rank 0's directory and save into it."""
        self._trainers.save(Path(self._trainers.broadcast(None).decode()))
