"""Every wait for an actor: by name, with a deadline, and with the actor's error as slime's own.

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
"""Concurrency groups of actors: one call at a time in each, side by side with those of the others."""
TAIL_LINES = 20
"""Of the log of an actor that died."""
_NEVER_RAN = "The actor never ran"
"""The last line of Ray's error of an actor whose process died before the first call of it."""
_LOOKS = 4
"""Looks at an actor within its deadline."""
_TOGETHER = 5.0
"""Seconds in which the errors of several actors are one event, of which the telling one is chosen."""


class TrainerDied(TrainError):
    """A trainer's actor is gone: `--max-trainer-restarts` may bring it back."""


class EngineGone(EngineError):
    """The engine's actor is gone, or is not the one that was called: `--use-fault-tolerance` may bring it back."""


@dataclass
class Member:
    """One actor."""

    name: str
    """As messages call it."""
    handle: Any
    error: type[SlimeError]
    """What an unexpected error of it becomes."""
    log: Path | None = None
    """Its output; None where nobody keeps it apart."""
    silence: float = 600.0
    """Seconds without an answer after which it counts as hung."""
    lanes: frozenset[str] = frozenset({WORK, CONTROL, BUCKETS, WEIGHTS, EVALUATION, TURNS})
    """Concurrency groups that it has; calls of others go to its default one."""
    death: type[SlimeError] | None = None
    """What its death becomes, where that is not `error`."""
    place: str = ""
    """Host and node, once it has told them."""

    def submit(self, method: str, *args: Any, group: str = WORK, num_returns: int = 1) -> Any:
        """Call without waiting; a reference, or several."""
        options = {"num_returns": num_returns} | ({"concurrency_group": group} if group in self.lanes else {})
        return getattr(self.handle, method).options(**options).remote(*args)

    def call(self, method: str, *args: Any, group: str = WORK) -> Any:
        """Call and wait. Raises what the actor raised."""
        return self.get(self.submit(method, *args, group=group), method)

    def get(self, reference: Any, what: str) -> Any:
        """The result of a call, once it is there. Raises what the actor raised."""
        return gather([self], [reference], what)[0]

    def first_of(self, reference: Any, other: Any, what: str) -> bool:
        """Wait for a call, or for another on the way; whether it was this one alone. Raises what this one raised."""
        done, _ = ray.wait([other, reference], num_returns=1, timeout=self.silence)
        if other in done:
            return False
        self.get(reference, what)
        return True

    def check(self, what: str) -> None:
        """Raise when the actor is dead or does not answer in time."""
        try:
            ray.get(self.submit("alive", group=CONTROL), timeout=self.silence)
        except GetTimeoutError:
            note = gave_up(f"{self.name}: {what}", self.silence, "the run stops")
            raise self.error(f"{self.name} hangs in {what}: {note}{tail(self.log)}") from None
        except RayError as error:
            raise self.told(error, what) from None

    def told(self, error: BaseException, what: str) -> BaseException:
        """What Ray raised -> what to raise. Tracebacks of unexpected errors are printed."""
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
        """With the end of its log; an actor that never ran has only Ray's, and Ray says why in the line before."""
        *before, reason = [line.strip() for line in str(self.error).splitlines() if line.strip()] or [""]
        log = tail(self.member.log)
        if before and reason.startswith(_NEVER_RAN):
            reason, log = before[-1], "; it never ran" + _printed(before)
        reason = reason.partition(". Some common causes")[0]
        kind = self.member.death or self.member.error
        where = f" on {self.member.place}" if self.member.place else ""
        return kind(f"{self.member.name}{where} died in {self.what}: {reason}{log}")


def _printed(said: Sequence[str]) -> str:
    """The end of what Ray's process for an actor printed, or where it lies on another machine; `said`: Ray's error."""
    context = ray.get_runtime_context()
    logs = Path(context.get_temp_dir(), context.get_session_name(), "logs")
    pid = next((line.removeprefix("pid: ") for line in said if line.startswith("pid: ")), "")
    here = f"ip: {ray.util.get_node_ip_address()}" in said
    found = next(logs.glob(f"worker-*-{pid}.err"), None) if here and pid else None
    return tail(found) if found is not None else f", and what Ray's process for it printed is in {logs} there"


def gather(members: Sequence[Member], references: Sequence[Any], what: str) -> list[Any]:
    """The results of one call on several actors, in order.

    Raises:
        SlimeError: What the first actor to fail raised; one that died goes before those that missed it.
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
    """`Member.get` for a coroutine. Cancelling it leaves the actor to its work."""
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
                break  # it died, which the call's own result will say
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
    """Of several errors the one that explains the others: a death before a broken connection."""
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
    """The end of an actor's log, for a message."""
    if log is None:
        return ""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return f"; its log {log} cannot be read here"
    return "\n".join([f"; its log {log} ends with", *lines]) if lines else f"; its log {log} is empty"


def as_known(error: Exception) -> Exception:
    """An error as it can travel: of a class that every process knows."""
    if isinstance(error, SlimeError):
        kind = next(c for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
        return error if kind is type(error) else kind(str(error))
    return error
