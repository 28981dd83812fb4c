"""Several training processes as one: rank 0 runs the loop and announces collective work, the other ranks follow.

::

    rank 0   {"do": "train", batch}  Learner.train | {"do": "push"}  WeightSync       | ... | {"do": "end"}
    others   Follower                Learner.train |                 FollowingWeights | ... |

The other ranks know nothing of rollouts, evaluations and intervals, in any mode. While rank 0 works alone, they wait in
a collective call that has a deadline (`--distributed-timeout-minutes`). Rank 0 sends several keep-alive messages within
the deadline. Only a process that hangs or has died misses it, and a rollout may take any time. Ranks here are
processes; several of them may form one data-parallel rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from slime_core.errors import RolloutError
from slime_core.launch.device import current_device, use_device
from slime_core.launch.trainers import Trainers
from slime_core.protocols import Trainer
from slime_core.sample import TrainBatch
from slime_core.sample.routed_experts import json_default
from slime_core.waits import waiting

_AT_WORK = {"do": "wait"}
_WORDS_PER_DEADLINE = 4
_LAST_WORD = 5.0
"""Seconds to wait at the end for a running collective call; after that no message is sent."""


class Leader:
    """Rank 0's side: announces each collective call to the other processes, and sends keep-alives in between.

    Args:
        trainer: Trainer that holds the connection to the other processes.
        deadline_minutes: Deadline of their wait for a message: `--distributed-timeout-minutes`.
    """

    def __init__(self, trainer: Trainer, deadline_minutes: float) -> None:
        self._trainer = trainer
        self._period = deadline_minutes * 60 / _WORDS_PER_DEADLINE
        self._turn = threading.Lock()
        """Lock that orders collective calls: only its holder makes them."""
        self._over = threading.Event()
        self._problem: Exception | None = None
        """Error of a failed keep-alive message."""
        self._failed = False
        """True after a collective call raised: the other processes may still be inside it."""
        self._device = current_device()
        threading.Thread(target=self._say_at_work, name="tells the other ranks", daemon=True).start()

    @contextmanager
    def together(self, do: str, **details: Any) -> Iterator[None]:
        """Announce `do` and hold the turn while the block runs, which the other processes run, too.

        Raises:
            RolloutError: A keep-alive message to the other processes failed.
        """
        with waiting("the thread that tells other ranks", deadline=None, then="--distributed-timeout-minutes ends it"):
            self._turn.acquire()
        try:
            if self._problem is not None:
                raise RolloutError(f"another training process has ended, or hangs: {self._problem}") from self._problem
            self._tell({"do": do, **details})
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._turn.release()

    def end(self, error: BaseException | None = None) -> None:
        """Send the end of the run and its error, unless the other processes may still be inside a call."""
        self._over.set()
        if not self._turn.acquire(timeout=_LAST_WORD):
            return
        try:
            if not self._failed and self._problem is None:
                self._tell({"do": "end"} | ({} if error is None else {"error": f"{type(error).__name__}: {error}"}))
        finally:
            self._turn.release()

    def _say_at_work(self) -> None:
        use_device(self._device)
        while not self._over.wait(self._period):
            with self._turn:
                if self._failed or self._over.is_set():
                    return
                try:
                    self._tell(_AT_WORK)
                except Exception as error:
                    self._problem = error
                    return

    def _tell(self, word: Mapping[str, Any]) -> None:
        self._trainer.broadcast(orjson.dumps(word, default=_json))


def _json(value: Any) -> Any:
    return asdict(value) if isinstance(value, TrainBatch) else json_default(value)


class LedTrainers:
    """Rank 0's trainers as its launcher sees them: the other processes run every call, too."""

    def __init__(self, leader: Leader, trainers: Trainers) -> None:
        self._leader, self._trainers = leader, trainers

    def save(self, directory: Path) -> None:
        """Save every process's part of a checkpoint."""
        with self._leader.together("save", directory=str(directory)):
            self._trainers.save(directory)

    def load(self, directory: Path) -> None:
        """Load every process's part of a checkpoint; inverse of `save`."""
        with self._leader.together("load", directory=str(directory)):
            self._trainers.load(directory)

    def offload(self) -> None:
        """Free the memory that only training needs; return when all processes have done so."""
        with self._leader.together("offload"):
            self._trainers.offload()

    def onload(self) -> None:
        """Take the memory for training again."""
        with self._leader.together("onload"):
            self._trainers.onload()


class Follower:
    """The side of ranks 1..n-1: runs the calls that rank 0 announces, and records nothing.

    Args:
        trainers: Trainers of this process.
        learner: Learner on these trainers.
        weights: A `weights.collective.FollowingWeights`.
    """

    def __init__(self, trainers: Trainers, learner: Any, weights: Any) -> None:
        self._trainers, self._learner, self._weights = trainers, learner, weights

    def run(self) -> None:
        """Run announced calls until rank 0 ends the run. Raises RolloutError if rank 0 failed."""
        while (word := self._next())["do"] != "end":
            self._follow(**word)
        if "error" in word:
            raise RolloutError(f"rank 0 failed: {word['error']}")

    def _next(self) -> dict[str, Any]:
        """Wait for the next message that is no keep-alive; every message comes within the process group's deadline."""
        word: dict[str, Any] = _AT_WORK
        while word == _AT_WORK:
            with waiting("a word of rank 0", deadline=None, then="--distributed-timeout-minutes ends it"):
                word = orjson.loads(self._trainers.broadcast(None))
        return word

    def _follow(self, do: str, **details: Any) -> None:
        if do == "train":
            self._learner.train(details["rollout_id"], TrainBatch(**details["batch"]))
        elif do == "push":
            self._weights.push()
        elif do in ("save", "load"):
            getattr(self._trainers, do)(Path(details["directory"]))
        else:
            assert do in ("offload", "onload"), do
            getattr(self._trainers, do)()
