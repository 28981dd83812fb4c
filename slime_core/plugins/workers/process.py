"""Reward worker process, seen from the thread that owns it: send calls, receive their outcomes.

`workers.pool` owns the processes; `workers.main` runs inside each process.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins.execution import LOAD_DEADLINE, START_DEADLINE, Component, DeadlineExceeded, overrun
from slime_core.plugins.messages import apply, args_changes, sample_state
from slime_core.procs.worker import Worker
from slime_core.sample import Sample

_BATCH_BYTES = 1 << 16
"""Size limit of all requests after the first, in bytes: a socket's buffer, so that neither side blocks on a write."""


@dataclass
class Call:
    """A call of a reward, and its outcome."""

    component: Component
    samples: Sequence[Sample]
    evaluation: bool
    timeout: float | None
    seed: int
    begun: Callable[[], None]
    future: asyncio.Future[list[Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    process: RewardProcess | None = None
    """The process that runs the call now."""
    given_up: bool = False
    """True once the caller gave up."""
    again: bool = False
    """True if a process was killed while it ran this call."""
    outcome: list[Any] | BaseException | None = None
    """Rewards, or the error."""


class WorkerError(Exception):
    """Error that the reward raised in its worker; subclasses carry the name of the original class."""

    worker_traceback: str = ""


class RewardProcess(Worker):
    """A worker process that computes rewards."""

    def __init__(self) -> None:
        super().__init__("a worker process of rewards", "slime_core.plugins.workers.main")
        self._loaded: set[Component] = set()
        self._args = b""

    def begin(self, args: bytes, memory_limit: float | None) -> None:
        """Start the process and wait for its first answer."""
        self._ask(("start", args, memory_limit), START_DEADLINE, "the start of a worker process")
        self._args = args

    def update(self, args: bytes) -> None:
        """Send the packed settings `args` of the pool to the process, unless it already has them."""
        if args is not self._args:
            self._ask(("update", args_changes(self._args, args)), START_DEADLINE, "new settings in a worker process:")
            self._args = args

    def load(self, component: Component) -> None:
        """Resolve and build a component in the process, unless this has been done."""
        if component not in self._loaded:
            request = ("load", component.key, component.spec, component.group, component.options)
            self._ask(request, LOAD_DEADLINE, f"loading {component.spec!r} in a worker process:")
            self._loaded.add(component)

    def run_all(self, calls: Sequence[Call]) -> Iterator[float]:
        """Score calls of one component and deadline, in order; load the component first if needed.

        Yields the seconds of each call once it has its outcome. Raises as `ask`, for the next call.
        """
        calls[0].process = self
        calls[0].begun()
        self.load(calls[0].component)
        requests = list(map(_request, calls))
        start = 0
        while start < len(calls):
            end, size = start + 1, 0
            while end < len(calls) and (size := size + len(requests[end])) <= _BATCH_BYTES:
                end += 1
            timeout = calls[0].timeout
            answers = self.ask_all([request for request in requests[start:end] if request], timeout)
            for call, request in zip(calls[start:end], requests[start:end]):
                seconds = 0.0
                if request:
                    call.process = self
                    call.begun()
                    try:
                        answer = next(answers)
                    except TimeoutError:
                        raise DeadlineExceeded(overrun(timeout, "--rm-timeout")) from None
                    call.process = None
                    seconds = _settle(call, *answer)
                yield seconds
            start = end

    def _ask(self, request: tuple[Any, ...], timeout: float | None, flag: str) -> None:
        """Send a request and wait for its completion."""
        try:
            answer = self.ask(request, timeout)
        except TimeoutError:
            raise DeadlineExceeded(overrun(timeout, flag)) from None
        if answer[1] != "ok":
            raise _error(*answer[2:])


def _request(call: Call) -> bytes:
    """Return the bytes to send for the call.

    The bytes are empty if the call has no samples, or if a sample cannot be sent; that error becomes the outcome.
    """
    if not call.samples:
        return b""
    try:
        states = pickle.dumps([sample_state(sample) for sample in call.samples])
    except Exception as error:
        call.outcome = PluginError(
            f"sample {call.samples[0].index} cannot be sent to a worker process ({type(error).__name__}: {error});"
            " keep plain data in sample.metadata, or declare RewardTraits(execution='thread') on the reward"
        )
        call.outcome.__cause__ = error
        return b""
    return pickle.dumps(("score", call.component.key, states, call.evaluation, call.seed))


def _settle(call: Call, seconds: float, word: str, *rest: Any) -> float:
    """Set the call's outcome, apply the reward's changes to its samples, and return the seconds that the call took."""
    if word == "ok":
        rewards, changed = rest
        for sample, fields in zip(call.samples, changed):
            apply(sample, fields)
        call.outcome = list(rewards)
    else:
        call.outcome = _error(*rest)
    return seconds


def _error(kind: str, text: str, worker_traceback: str) -> Exception:
    """Return an exception that reads like the exception raised in the worker."""
    if kind.startswith("Plugin"):
        error: Exception = PluginError(text)
    else:
        error = type(kind, (WorkerError,), {"__module__": "builtins"})(text)
    error.worker_traceback = worker_traceback  # type: ignore[attr-defined]
    return error
