"""Waits for actors, each with a name and a deadline; an actor's error is raised as slime's own error.

`Member` is an actor as the driver, or another actor, knows it. The deadline is not that of the work, which may take as
long as it takes, but of the actor's process, which must answer in between: an actor that is dead is noticed at once,
and one that hangs after `silence` seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from slime_core import errors
from slime_core.errors import EngineError, SlimeError, TrainError
from slime_core.waits import gave_up, waiting

WORK, CONTROL, BUCKETS, WEIGHTS, EVALUATION, TURNS = "work", "control", "buckets", "weights", "evaluation", "turns"
"""Concurrency groups of actors: each runs one call at a time, in parallel with the other groups."""
TAIL_LINES = 20
"""Number of lines shown of the log of an actor that died."""
_NEVER_RAN = "The actor never ran"
"""Start of the last line of Ray's error for an actor whose process died before its first call."""
_LOOKS = 4
"""Number of checks of an actor within its deadline."""
_TOGETHER = 5.0
"""Seconds within which errors of several actors are one event; the most informative error is raised."""


class TrainerDied(TrainError):
    """A trainer's actor is gone; `--max-trainer-restarts` may restart it."""


class EngineGone(EngineError):
    """The engine's actor is gone or was replaced since the call; `--use-fault-tolerance` may restart it."""


@dataclass
class Member:
    """An actor with its name, error classes and deadlines."""

    name: str
    """Name in messages."""
    handle: Any
    error: type[SlimeError]
    """Error class for an unexpected error of the actor."""
    log: Path | None = None
    """File of the actor's output; None if the output has no file of its own."""
    silence: float = 600.0
    """Seconds without an answer after which the actor counts as hung."""
    lanes: frozenset[str] = frozenset({WORK, CONTROL, BUCKETS, WEIGHTS, EVALUATION, TURNS})
    """Concurrency groups of the actor; calls for other groups go to its default group."""
    death: type[SlimeError] | None = None
    """Error class for the actor's death, if it is not `error`."""
    place: str = ""
    """Host and node, once known."""

    def submit(self, method: str, *args: Any, group: str = WORK, num_returns: int = 1) -> Any:
        """Call without waiting and return the reference, or several references."""
        options = {"num_returns": num_returns} | ({"concurrency_group": group} if group in self.lanes else {})
        return getattr(self.handle, method).options(**options).remote(*args)

    def call(self, method: str, *args: Any, group: str = WORK) -> Any:
        """Call and wait. Raises what the actor raised."""
        return self.get(self.submit(method, *args, group=group), method)

    def get(self, reference: Any, what: str) -> Any:
        """Wait for a call and return its result. Raises what the actor raised."""
        return gather([self], [reference], what)[0]

    def first_of(self, reference: Any, other: Any, what: str) -> bool:
        """Wait until this call or another ends; return whether only this call did. Raises what this call raised."""
        done, _ = ray.wait([other, reference], num_returns=1, timeout=self.silence)
        if other in done:
            return False
        self.get(reference, what)
        return True

    def check(self, what: str) -> None:
        """Raise if the actor is dead or does not answer in time."""
        try:
            ray.get(self.submit("alive", group=CONTROL), timeout=self.silence)
        except GetTimeoutError:
            note = gave_up(f"{self.name}: {what}", self.silence, "the run stops")
            raise self.error(f"{self.name} hangs in {what}: {note}{tail(self.log)}") from None
        except RayError as error:
            raise self.told(error, what) from None

    def told(self, error: BaseException, what: str) -> BaseException:
        """Convert an error of Ray to the error to raise. Print tracebacks of unexpected errors."""
        if isinstance(error, RayTaskError):
            cause = error.cause
            if isinstance(cause, SlimeError):
                return cause
            print(str(error), file=sys.stderr, flush=True)
            return self.error(f"{self.name} failed in {what}: {type(cause).__name__}: {cause}")
        if isinstance(error, RayActorError):
            return _Died(self, what, error).to_error()
        return self.error(f"{self.name} could not be reached for {what}: {type(error).__name__}: {error}")


@dataclass
class _Died:
    member: Member
    what: str
    error: RayActorError

    def to_error(self) -> SlimeError:
        """Return the error with the end of the actor's log.

        An actor that never ran has only Ray's log, and the line before Ray's last line has the reason.
        """
        *before, reason = [line.strip() for line in str(self.error).splitlines() if line.strip()] or [""]
        log = tail(self.member.log)
        if before and reason.startswith(_NEVER_RAN):
            reason, log = before[-1], "; it never ran" + _printed(before)
        reason = reason.partition(". Some common causes")[0]
        kind = self.member.death or self.member.error
        where = f" on {self.member.place}" if self.member.place else ""
        return kind(f"{self.member.name}{where} died in {self.what}: {reason}{log}")


def _printed(said: Sequence[str]) -> str:
    """Return the end of the output of Ray's process for an actor, or its path on another machine.

    Args:
        said: Lines of Ray's error.
    """
    context = ray.get_runtime_context()
    logs = Path(context.get_temp_dir(), context.get_session_name(), "logs")
    pid = next((line.removeprefix("pid: ") for line in said if line.startswith("pid: ")), "")
    here = f"ip: {ray.util.get_node_ip_address()}" in said
    found = next(logs.glob(f"worker-*-{pid}.err"), None) if here and pid else None
    return tail(found) if found is not None else f", and what Ray's process for it printed is in {logs} there"


def gather(members: Sequence[Member], references: Sequence[Any], what: str) -> list[Any]:
    """Wait for a call on several actors and return the results in order.

    Raises:
        SlimeError: Error of the first actor that failed; a death takes precedence over errors that follow from it.
    """
    if not members:
        return []
    left = dict(zip(references, members))
    names = members[0].name if len(members) == 1 else f"{members[0].name} and {len(members) - 1} more"
    period = min(member.silence for member in members) / _LOOKS
    with waiting(f"{names}: {what}", deadline=None, then="as long as the process answers; the run stops when not"):
        while left:
            done, _ = ray.wait(list(left), num_returns=1, timeout=period, fetch_local=False)
            if not done:
                for member in set(map(id, left.values())):
                    next(m for m in left.values() if id(m) == member).check(what)
            for reference in done:
                failed = _failure(left[reference], reference, what)
                if failed is not None:
                    raise _telling(failed, left, reference, what) from None
                del left[reference]
        return [ray.get(reference) for reference in references]


async def awaited(member: Member, reference: Any, what: str) -> Any:
    """Await what `Member.get` waits for. Cancelling it does not stop the actor's work."""
    result = asyncio.wrap_future(reference.future())
    period = member.silence / _LOOKS
    with waiting(f"{member.name}: {what}", deadline=None, then="as long as the process answers; then an error"):
        while True:
            done, _ = await asyncio.wait({result}, timeout=period)
            if done:
                break
            sign = asyncio.wrap_future(member.submit("alive", group=CONTROL).future())
            done, _ = await asyncio.wait({sign, result}, timeout=member.silence, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                note = gave_up(f"{member.name}: {what}", member.silence, "an error")
                raise member.error(f"{member.name} hangs in {what}: {note}{tail(member.log)}")
            if sign.done() and not result.done() and sign.exception() is not None:
                break  # the actor died; the call's own result will report it
    try:
        return await result
    except RayError as error:
        raise member.told(error, what) from None


def _failure(member: Member, reference: Any, what: str) -> RayError | None:
    try:
        ray.get(reference, timeout=member.silence)
    except RayError as error:
        return error
    return None


def _telling(failed: RayError, left: dict[Any, Member], reference: Any, what: str) -> BaseException:
    """Return the error that explains the others: a death takes precedence over a broken connection."""
    first = left.pop(reference)
    until = time.monotonic() + _TOGETHER
    if not isinstance(failed, RayActorError):
        while left and time.monotonic() < until:
            done, _ = ray.wait(list(left), num_returns=1, timeout=max(0.0, until - time.monotonic()))
            for other in done:
                member = left.pop(other)
                error = _failure(member, other, what)
                if isinstance(error, RayActorError):
                    return member.told(error, what)
    return first.told(failed, what)


def tail(log: Path | None) -> str:
    """Return the end of an actor's log, for a message."""
    if log is None:
        return ""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return f"; its log {log} cannot be read here"
    return "\n".join([f"; its log {log} ends with", *lines]) if lines else f"; its log {log} is empty"


def as_known(error: Exception) -> Exception:
    """Return an error that can be sent: its class is known to every process."""
    if isinstance(error, SlimeError):
        kind = next(c for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
        return error if kind is type(error) else kind(str(error))
    return error
