"""Several training processes as one: rank 0 runs the loop and says what is done together, the others follow.

::

    rank 0   {"do": "train", batch}  Learner.train | {"do": "push"}  WeightSync       | ... | {"do": "end"}
    others   Follower                Learner.train |                 FollowingWeights | ... |

So the others know nothing of rollouts, evaluations and intervals, in any mode. While rank 0 works alone they wait in a
collective call that has a deadline (`--distributed-timeout-minutes`). It says several times within it that it is at
work, so the deadline is that of a process that hangs or is gone, and a rollout may take as long as it takes. This is
about processes, of which several may be one data-parallel rank.
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
from slime_core.routed_experts import json_default
from slime_core.types import TrainBatch
from slime_core.waits import waiting

_AT_WORK = {"do": "wait"}
_WORDS_PER_DEADLINE = 4
_LAST_WORD = 5.0
"""Seconds that a collective call which goes on at the end gets to be over; after that nothing more is said."""


class Leader:
    """Rank 0: a word to the other processes before each collective call, and a sign of life between them.

    Args:
        trainer: Has the connection to the others.
        deadline_minutes: Of their wait for a word: `--distributed-timeout-minutes`.
    """

    def __init__(self, trainer: Trainer, deadline_minutes: float) -> None:
        self._trainer = trainer
        self._period = deadline_minutes * 60 / _WORDS_PER_DEADLINE
        self._turn = threading.Lock()
        """Collective calls come in one order: whoever holds it makes them."""
        self._over = threading.Event()
        self._problem: Exception | None = None
        """Why the others could not be told anything."""
        self._failed = False
        """A collective call has raised, so the others may be in the middle of it."""
        self._device = current_device()
        threading.Thread(target=self._say_at_work, name="tells the other ranks", daemon=True).start()

    @contextmanager
    def together(self, do: str, **details: Any) -> Iterator[None]:
        """Around what the others do, too.

        Raises:
            RolloutError: They could not be told that this process is at work.
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
        """Tell the others that it is over, and how; nothing where they may be in the middle of a call."""
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
    """Rank 0's trainers as its launcher sees them: what they do the other processes do, too."""

    def __init__(self, leader: Leader, trainers: Trainers) -> None:
        self._leader, self._trainers = leader, trainers

    def save(self, directory: Path) -> None:
        """All processes' part of a checkpoint."""
        with self._leader.together("save", directory=str(directory)):
            self._trainers.save(directory)

    def load(self, directory: Path) -> None:
        """Inverse of `save`."""
        with self._leader.together("load", directory=str(directory)):
            self._trainers.load(directory)

    def offload(self) -> None:
        """Give up what only training needs; returns when all processes have."""
        with self._leader.together("offload"):
            self._trainers.offload()

    def onload(self) -> None:
        """Take it again."""
        with self._leader.together("onload"):
            self._trainers.onload()


class Follower:
    """Ranks 1..n-1: does what rank 0 says, and records nothing.

    Args:
        trainers: Of this process.
        learner: On these trainers.
        weights: `weights.collective.FollowingWeights`.
    """

    def __init__(self, trainers: Trainers, learner: Any, weights: Any) -> None:
        self._trainers, self._learner, self._weights = trainers, learner, weights

    def run(self) -> None:
        """Until rank 0 says that it is over. Raises RolloutError when it failed."""
        while (word := self._next())["do"] != "end":
            self._follow(**word)
        if "error" in word:
            raise RolloutError(f"rank 0 failed: {word['error']}")

    def _next(self) -> dict[str, Any]:
        """The next word that is more than a sign of life; each comes within the process group's deadline."""
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
