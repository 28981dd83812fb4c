"""Deadlines of prompt groups and of rollouts in which no sample ends: `--group-timeout`, `--rollout-stall-timeout`.

`rollout.pool` and `rollout.evaluate` run groups by `group_runner` here, and wait with `some_done`. If a group exceeds
its deadline, `--group-timeout-policy` decides:

    retry        generate the prompt again, `--group-timeout-retries` times; then as substitute
    substitute   every sample is FAILED; the scheduler draws another prompt, as for any failed group
    shrink       unfinished samples are FAILED; the others are kept
    drop         every sample is FAILED, and `dropped_for_good(group)` is true: no other prompt is drawn
    stop         raise RolloutError

In an evaluation no other prompt is drawn, so substitute and drop act as shrink, and failed samples have reward 0.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.errors import RolloutError, RolloutInterrupted, rollout_name
from slime_core.protocols import Args
from slime_core.rollout.fate import GROUP_TIMEOUT, restarted
from slime_core.sample import Group
from slime_core.waits import gave_up, leave_behind, waiting, within

if TYPE_CHECKING:
    from slime_core.rollout.generate import SampleRunner


logger = logging.getLogger(__name__)

T = TypeVar("T")
CANCEL_GRACE = 5.0
"""Seconds for cancelled work to end."""
_STALL_MARGIN = 60.0
_STALLED = "the run stops: no sample ends (--rollout-stall-timeout)"


def _stall_limit(args: Args, sample_hooks: int) -> float | None:
    """Return the seconds allowed without the end of a sample; each sample hook may take `--rollout-timeout`, too."""
    found: float | None = args.rollout_stall_timeout
    if found is None and args.rollout_timeout and args.rm_timeout:
        found = args.rollout_timeout * (1 + sample_hooks) + args.rm_timeout + _STALL_MARGIN
    return found


class GroupClock:
    """The deadline of a try of a group: `expired` is done `seconds` after the first `start`."""

    def __init__(self, seconds: float, wait: waiting, cuts: bool) -> None:
        self.expired: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.cuts = cuts
        """True if the runner, at the deadline, ends samples that are not done and continues with the others."""
        self._seconds, self._wait = seconds, wait
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the clock when the first sample gets its place, for which a group may wait long."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self.expired.set_result, None)
            self._wait.restart(self._seconds)

    def close(self) -> None:
        """Stop the clock, because the group is done."""
        if self._handle is not None:
            self._handle.cancel()


def group_runner(runner: SampleRunner) -> Callable[..., Awaitable[Group]]:
    """Return `runner.run_group`; if the run has a `--group-timeout`, under that deadline and with a keyword `again`."""
    limit = runner.args.group_timeout
    return runner.run_group if limit is None else partial(_run_in_time, runner, limit)


async def _run_in_time(
    runner: SampleRunner,
    seconds: float,
    group: Group,
    params: dict[str, object],
    *,
    rollout_id: int,
    evaluation: bool = False,
    again: Callable[[], None] = lambda: None,
    **keywords: object,
) -> Group:
    """Run `runner.run_group` under `--group-timeout`. Raises RolloutError by policy stop, and the runner's errors.

    `again` is called before every try but the first.
    """
    policy = runner.args.group_timeout_policy
    name = f"group {group[0].group_index} of {rollout_name(rollout_id)}"
    if evaluation:
        name = f"evaluated group {group[0].group_index} at {rollout_name(rollout_id)}"
        policy = "shrink" if policy in ("substitute", "drop") else policy
    keywords |= {"rollout_id": rollout_id, "evaluation": evaluation}
    tries = 1 + (runner.args.group_timeout_retries if policy == "retry" else 0)
    for attempt in range(1, tries + 1):
        result, obeyed = await _one_try(runner, group, params, keywords, name, seconds, policy)
        if result is not None:
            return result
        if not obeyed:  # tasks left behind may still write to the samples
            group = copy.deepcopy(group)
            break
        if attempt < tries:
            group = restarted(group)
            again()
    for sample in group:
        sample.fail(GROUP_TIMEOUT, f"the group was not done within {seconds:g} s ({policy})")
        if policy == "drop":
            sample.metadata["failure"]["dropped"] = True
    runner.count_failures(group)
    return group


async def _one_try(
    runner: SampleRunner,
    group: Group,
    params: dict[str, object],
    keywords: Mapping[str, Any],
    name: str,
    seconds: float,
    policy: str,
) -> tuple[Group | None, bool]:
    """Return (group, _), or at its deadline (None, whether the work has ended)."""
    cuts = policy == "shrink"
    with waiting(name, deadline=None, then=f"--group-timeout-policy {policy}", queued=True) as wait:
        clock = GroupClock(seconds, wait, cuts)
        task = asyncio.create_task(runner.run_group(group, params, clock=clock, **keywords))
        try:
            await asyncio.wait({task, clock.expired}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                message = gave_up(name, seconds, f"--group-timeout; policy {policy}")
                if policy == "stop":
                    raise RolloutError(message)
                logger.warning("%s", message)
                if cuts:  # its samples have been ended; a reward of the whole group may still run
                    await asyncio.wait({task}, timeout=seconds + CANCEL_GRACE)
            return (task.result(), True) if task.done() else (None, await ended({task}))
        except BaseException:
            await ended({task})
            raise
        finally:
            clock.close()


async def ended(tasks: Collection[asyncio.Future[Any]]) -> bool:
    """Cancel tasks. Returns whether all of them ended within `CANCEL_GRACE` seconds; the others are left behind."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # marks the exception as retrieved
    if not left:
        return True
    with waiting("cancelled samples", deadline=CANCEL_GRACE, then="they are left behind"):
        _, late = await asyncio.wait(left, timeout=CANCEL_GRACE)
    if late:
        logger.warning("%d tasks did not end within %g s of being cancelled; left behind", len(late), CANCEL_GRACE)
        for task in late:
            leave_behind(task)
    return not late


async def some_done(bell: asyncio.Event, runner: SampleRunner, what: str) -> None:
    """Wait for the event loop's next turn after the bell is set: what happens in one turn is seen together.

    Raises:
        RolloutError: No sample of this runner has ended for `--rollout-stall-timeout` seconds.
    """
    loop, limit = asyncio.get_running_loop(), _stall_limit(runner.args, len(runner.hooks.on_sample))
    since = loop.time()
    while True:
        with waiting(what, deadline=limit, then=_STALLED, stop=True):
            left = None if limit is None else max(since + limit - loop.time(), 0.0)
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await bell.wait()
                    await asyncio.sleep(0)
                    return
            if runner.last_end <= since:
                raise RolloutError(gave_up(what, limit, "no sample ended in that time; --rollout-stall-timeout"))
        since = runner.last_end


async def all_done(gathered: asyncio.Future[T], runner: SampleRunner, what: str) -> T:
    """Return the result of `asyncio.gather`; cancel it if the wait ends. Raises RolloutError as `some_done` does."""
    try:
        bell = asyncio.Event()
        gathered.add_done_callback(lambda _: bell.set())
        await some_done(bell, runner, what)
    except BaseException:
        gathered.cancel()
        await asyncio.wait({gathered}, timeout=CANCEL_GRACE)
        raise
    return gathered.result()


# -- work that ends when the run stops ---------------------------------------------------------------

_CANCEL_DEADLINE = 10.0
"""Seconds that interrupted work has to stop its requests before the engine is stopped."""
TIMEOUT = "the run stops (--eval-timeout)"


class Interruptible:
    """Work in an event loop that is cancelled when the run stops."""

    def __init__(self) -> None:
        self.interrupted = False
        """True once no more work may begin."""
        self._running: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = set()

    def interrupt(self) -> None:
        """Cancel running and later work at its next await; any thread and a signal handler may call this."""
        self.interrupted = True
        for loop, task in tuple(self._running):
            loop.call_soon_threadsafe(task.cancel)

    async def run(self, work: Coroutine[object, None, T]) -> T:
        """Await the work and return its result. Raises RolloutInterrupted if `interrupt` cancelled it."""
        task = asyncio.create_task(work)
        entry = (asyncio.get_running_loop(), task)
        self._running.add(entry)
        if self.interrupted:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if not self.interrupted or (waiter is not None and waiter.cancelling()):
                raise
            raise RolloutInterrupted(drew=False) from None
        finally:
            self._running.discard(entry)


async def evaluated(running: Interruptible, work: Coroutine[object, None, T], what: str, timeout: float | None) -> T:
    """Run an evaluation and return its result; with `--eval-in-background` it may run during a rollout.

    An evaluation draws nothing from the data source, so an interrupted one gives nothing back, and a resumed run
    repeats it.

    Raises:
        RolloutInterrupted: The evaluation was interrupted.
        RolloutError: The evaluation did not finish within `timeout` seconds; the message names the stall report.
    """
    try:
        return await running.run(within(work, what, deadline=timeout, then=TIMEOUT, error=RolloutError))
    finally:
        if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()  # it never started, so Python would warn that it was never awaited


async def cancel_all(tasks: set[asyncio.Task[Any]], then: Callable[[], Awaitable[None]] | None = None) -> None:
    """Cancel rollouts and evaluations, then call `then`.

    They may still run after an interrupt that did not pass through the event loop, or if another thread waits for them.
    """
    running = {task for task in tasks if not task.done()}
    for task in running:
        task.cancel()
    if running:
        with waiting("rollouts and evaluations to end", deadline=_CANCEL_DEADLINE, then="they are left behind"):
            await asyncio.wait(running, timeout=_CANCEL_DEADLINE)
    if then is not None:
        await then()
