"""The gate: an engine may step only when every live sample waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from slime_core.rollout.gate import GatedEngine, Hold, Place
from slime_core.sample import GenerationOutput
from slime_core.waits import current


def lent(hold: Hold, works: Sequence[Callable[[], Awaitable[Any]]]) -> list[asyncio.Task[Any]]:
    """Start samples of a group as the sample runner does."""

    async def run(work: Callable[[], Awaitable[Any]], place: Place) -> Any:
        try:
            await place.begin()
            return await work()
        finally:
            place.leave()

    runs = []
    for work in works:
        place = hold.place()
        runs.append(asyncio.create_task(run(work, place)))
        runs[-1].add_done_callback(lambda _, place=place: place.leave())
    hold.lend()
    return runs


class Engine:
    may_step = None

    def __init__(self) -> None:
        self.notified = 0
        self.release = asyncio.Event()

    def notify(self) -> None:
        self.notified += 1

    async def generate(self, input_ids, sampling_params, *, rid=None, session_id=None):
        await self.release.wait()
        return GenerationOutput([1], [-1.0], "x", {})


async def test_steps_wait_for_user_code() -> None:
    engine = Engine()
    gate = GatedEngine(engine, deterministic=True)
    assert engine.may_step()
    with gate.hold(), gate.hold():
        assert not engine.may_step()
        first = asyncio.create_task(gate.generate([1], {}))
        await asyncio.sleep(0)
        assert not engine.may_step()  # the other live sample is in user code
        second = asyncio.create_task(gate.generate([1], {}))
        await asyncio.sleep(0)
        assert engine.may_step()
        before = engine.notified
        engine.release.set()
        await asyncio.gather(first, second)
        assert not engine.may_step()
    assert engine.may_step()
    assert engine.notified > before


async def test_without_determinism_the_engine_is_left_alone() -> None:
    engine = Engine()
    gate = GatedEngine(engine, deterministic=False)
    with gate.hold():
        assert engine.may_step is None
    assert engine.notified == 0


async def test_a_group_has_the_engine_wait_from_its_drawing_to_the_decision_on_it() -> None:
    engine = Engine()
    gate = GatedEngine(engine, deterministic=True, places=1)
    may_step, go_on = [], asyncio.Event()

    async def sample() -> None:
        await gate.generate([1], {})
        may_step.append(engine.may_step())

    async def group() -> None:
        for run in lent(hold, [sample, sample]):
            await run
            may_step.append(engine.may_step())
        await go_on.wait()  # it is scored as a whole
        hold.complete()

    hold = gate.hold()
    assert not engine.may_step(), "the group has yet to begin"
    task = asyncio.create_task(group())
    while gate._waiting == 0:
        assert not engine.may_step()
        await asyncio.sleep(0)
    assert engine.may_step(), "one sample waits for the engine, the other one for its place"
    engine.release.set()
    while len(may_step) < 4:
        await asyncio.sleep(0)
    settled = asyncio.create_task(gate.settled())
    await asyncio.sleep(0)
    assert not settled.done()
    go_on.set()
    await asyncio.wait_for(asyncio.gather(task, settled), 60)
    assert not any(may_step)
    assert not engine.may_step(), "complete, and not decided on"
    hold.close()
    hold.close()
    assert engine.may_step()


async def test_a_group_that_was_given_up_does_not_hold_the_engine() -> None:
    engine = Engine()
    gate = GatedEngine(engine, deterministic=True)

    async def broken() -> None:
        raise KeyError

    with gate.hold() as hold:
        runs = lent(hold, [engine.release.wait, engine.release.wait, broken])
        never_begins, rest, failed = runs
        never_begins.cancel()
        with pytest.raises(KeyError):
            await failed
    engine.release.set()
    await rest
    assert never_begins.cancelled()
    assert engine.may_step()


async def test_a_place_is_lost_by_no_cancellation_and_waited_for_by_name() -> None:
    gate = GatedEngine(Engine(), deterministic=True, places=1)
    go_on, entered = asyncio.Event(), []

    async def sample(name: str) -> None:
        entered.append(name)
        await go_on.wait()

    def names() -> list[str]:
        return [wait.what for wait in current() if "free place" in wait.what]

    with gate.hold() as hold:
        runs = lent(hold, [partial(sample, name) for name in "abcde"])
        await asyncio.sleep(0)
        assert len(names()) == 1
        runs[1].cancel()  # waits
        runs[0].cancel()  # has begun
        await asyncio.sleep(0)
        runs[2].cancel()  # its turn has come, but it has not run yet
        go_on.set()
        await asyncio.gather(*runs, return_exceptions=True)
    assert entered == ["a", "d", "e"]
    assert [run.cancelled() for run in runs] == [True, True, True, False, False]
    assert names() == []


async def test_what_is_no_exception_reaches_who_waits_and_frees_the_place() -> None:
    class Gone(BaseException):
        pass

    async def sample(name: str) -> str:
        if name == "a":
            raise Gone(name)
        return name

    gate = GatedEngine(Engine(), deterministic=True, places=1)
    with gate.hold() as hold:
        runs = lent(hold, [partial(sample, name) for name in "ab"])
        found = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 10)
    assert [type(one) for one in found] == [Gone, str]


async def test_the_engine_is_busy_while_a_request_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    gate = GatedEngine(engine, deterministic=False)
    now = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    requests = [asyncio.ensure_future(gate.generate([1], {})) for _ in range(2)]
    await asyncio.sleep(0)
    now = 103.0
    assert gate.take_busy_seconds() == 3.0  # two at a time are no longer than one
    now = 105.0
    engine.release.set()
    await asyncio.gather(*requests)
    now = 110.0
    assert gate.take_busy_seconds() == 2.0
    assert gate.take_busy_seconds() == 0.0
