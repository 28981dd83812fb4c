"""The gate: an engine may step only when every live sample waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from slime_core.rollout.gate import GatedEngine, Hold, Place
from slime_core.sample import GenerationOutput
from slime_core.waits import current
from tests.agent_toys import StreamingEngine, ToyTokenizer


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


# -- streams ---------------------------------------------------------------------------------------------


class Notified(StreamingEngine):
    """Says when it may step, as the embedded engine asks."""

    def notify(self) -> None:
        """Nothing to wake."""


async def test_a_stream_waits_for_the_engine_like_any_request() -> None:
    engine: Any = Notified(["abcdefgh"], tokenizer=ToyTokenizer())
    gated = GatedEngine(engine, deterministic=True)
    with gated.hold():
        assert not engine.may_step(), "the sample runs user code"
        async with aclosing(gated.stream([1], {"max_new_tokens": 9}, rid="r")) as outputs:
            lengths = []
            async for output in outputs:
                assert engine.may_step()
                lengths.append(len(output.token_ids))
        assert lengths == [3, 6, 9]
        assert not engine.may_step()
    assert gated.take_busy_seconds() >= 0
