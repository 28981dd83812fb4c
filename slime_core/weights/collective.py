"""Weights that several processes hold together (`Trainer.collective_weights`), sent by one of them.

`WeightSync` on rank 0 reads them through `SharedWeights`, as often as transport, engine and check need them. The other
processes follow in `FollowingWeights`, which the launcher gives to their loop::

    rank 0   pass pass ...   end of the update, or what went wrong
    others   pass pass ...   return, or raise

An engine may stop in the middle of a pass and raise. The other processes are still in this pass, so rank 0 reads the
pass to its end before it reports the error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import torch

from slime_core.errors import WeightSyncError
from slime_core.protocols import Args, Trainer, TrainerTraits, traits_of

_PASS, _DONE, _FAILED = "pass", "done", "failed"


class SharedWeights:
    """The actor's weights on torch's rank 0; every read of them is announced to the processes that hold a part.

    A trainer without `collective_weights` is read directly, and nothing is announced.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._collective = traits_of(trainer, TrainerTraits).collective_weights
        self._pass: _Pass | None = None

    @contextmanager
    def update(self) -> Iterator[None]:
        """Wrap everything that an update of the engines does with the weights.

        An error inside reaches the other processes, which raise as well. An interrupt does not, since an interrupted
        run ends all its processes.
        """
        try:
            yield
            self._finish_pass()
        except Exception as error:
            self._tell_failure(error)
            raise
        self._tell(_DONE)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read `Trainer.named_weights` together with the other processes; every call starts from the beginning."""
        if not self._collective:
            return iter(self._trainer.named_weights())
        self._finish_pass()
        self._tell(_PASS)
        self._pass = _Pass(iter(self._trainer.named_weights()))
        return self._pass

    def _finish_pass(self) -> None:
        if self._pass is not None:
            self._pass.finish()
            self._pass = None

    def _tell_failure(self, error: Exception) -> None:
        if self._pass is not None and self._pass.broken:
            # The others wait inside a pass that this process cannot continue; they end when its connections close.
            return
        self._finish_pass()
        self._tell(_FAILED, f"{type(error).__name__}: {error}")

    def _tell(self, what: str, message: str = "") -> None:
        if self._collective:
            self._trainer.broadcast(orjson.dumps([what, message]))


class _Pass:
    """A pass over the weights, which any thread can read to its end after the reader has stopped.

    A reader that continues after this gets an error, not an early end that looks like a whole model.
    """

    def __init__(self, source: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._finished = False
        self.broken = False
        """True if the trainer failed in the middle of the pass."""

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        with self._lock:
            if self._finished:
                raise WeightSyncError("these weights are no longer handed out: the update they belong to has ended")
            return self._next()

    def finish(self) -> None:
        """Read the rest of the pass and drop it."""
        with self._lock:
            self._finished = True
            while True:
                try:
                    self._next()
                except StopIteration:
                    return

    def _next(self) -> tuple[str, torch.Tensor]:
        try:
            return next(self._source)
        except StopIteration:
            raise
        except BaseException:
            self.broken = True
            raise


class FollowingWeights:
    """Stand-in for `WeightSync` on the other processes: takes part in the passes of rank 0."""

    def __init__(self, args: Args, trainer: Trainer) -> None:
        self._trainer = trainer
        self._collective = traits_of(trainer, TrainerTraits).collective_weights
        self._keeps_old_actor = args.keep_old_actor

    def push(self) -> dict[str, float]:
        """Read the weights as often as rank 0 does. Raises WeightSyncError if rank 0's update failed."""
        while self._collective:
            what, message = orjson.loads(self._trainer.broadcast(None))
            if what == _FAILED:
                raise WeightSyncError(f"the weight update failed on rank 0: {message}")
            if what == _DONE:
                break
            for _ in self._trainer.named_weights():
                pass
        if self._keeps_old_actor:
            self._trainer.update_old_actor()
        return {}
