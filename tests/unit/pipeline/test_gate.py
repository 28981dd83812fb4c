"""The gate: an engine may step only when every live sample waits for it."""

from __future__ import annotations

import asyncio

from slime_core.pipeline.gate import GatedEngine
from slime_core.types import GenerationOutput


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
    with gate.live(), gate.live():
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
    with gate.live():
        assert engine.may_step is None
    assert engine.notified == 0


async def test_time_held_by_user_code_is_counted() -> None:
    engine = Engine()
    gate = GatedEngine(engine, deterministic=True)
    with gate.live():
        request = asyncio.create_task(gate.generate([1], {}))
        await asyncio.sleep(0)
        with gate.live():
            await asyncio.sleep(0.02)  # another sample's tool
        engine.release.set()
        await request
    assert gate.take_held_seconds() >= 0.02
    assert gate.take_held_seconds() == 0.0
