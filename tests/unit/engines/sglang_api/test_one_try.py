"""What ends a try from outside: its server is taken out, its time is over, its caller is cancelled, or two of these."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from slime_engine_sglang.api.worker import WorkerState

from slime_core.errors import EngineError
from tests.unit.engines.sglang_api.servers import Server, answer, engine_at, generating, hang, servers, sse, well
from tests.until import until


async def test_a_stream_of_a_server_that_hangs_before_it_begins_goes_elsewhere() -> None:
    async def stream(server: Server, request: Any, body: Any, before: int) -> Any:
        return await sse(request, answer(1))

    async with servers(generating(hang), generating(stream)) as made, engine_at(*made) as engine:
        outputs = engine.stream([3], {})
        first = asyncio.create_task(anext(outputs))
        await until(lambda: made[0].asked("/generate"))
        engine.pool.set_state(engine.pool.workers[0], WorkerState.QUARANTINED, "hung")
        assert (await asyncio.wait_for(first, 30)).token_ids == [1]
        assert [o.token_ids async for o in outputs] == []
        assert [w.busy for w in engine.pool.workers] == [0, 0]


async def test_every_request_has_its_own_deadline() -> None:
    async with servers(generating(hang)) as (server,), engine_at(server, rollout_timeout=0.4) as engine:
        began, ended = time.monotonic(), []

        async def one(delay: float) -> None:
            await asyncio.sleep(delay)
            with pytest.raises(EngineError, match=r"no answer within 0.4 s \(--rollout-timeout\)"):
                await engine.generate([3], {})
            ended.append(time.monotonic() - began - delay)

        await asyncio.gather(one(0.0), one(0.2), one(0.3))
        assert len(ended) == 3
        assert all(0.39 < seconds < 10 for seconds in ended), ended
        assert engine.pool.workers[0].state is WorkerState.READY
        assert engine.pool.workers[0].busy == 0


async def test_a_caller_who_is_cancelled_while_its_server_is_taken_out_is_cancelled() -> None:
    async with servers(generating(hang), well) as (hung, good), engine_at(hung, good) as engine:
        task = asyncio.create_task(engine.generate([3], {}))
        await until(lambda: hung.asked("/generate"))
        engine.pool.set_state(engine.pool.workers[0], WorkerState.QUARANTINED, "hung")
        engine._running()._flights._take_note(engine.pool.workers[0])  # cut now, ...
        task.cancel()  # ... and cancelled before the task turns
        with pytest.raises(asyncio.CancelledError):
            await task
        assert good.asked("/generate") == []
        assert engine.pool.workers[0].busy == 0


async def test_a_request_that_was_cut_can_be_cancelled_later() -> None:
    async with servers(generating(hang), generating(hang)) as made, engine_at(*made) as engine:
        task = asyncio.create_task(engine.generate([3], {}))
        await until(lambda: made[0].asked("/generate"))
        engine.pool.set_state(engine.pool.workers[0], WorkerState.QUARANTINED, "hung")
        await until(lambda: made[1].asked("/generate"))
        assert task.cancelling() == 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(made[1].asked("/abort_request")) == 1
        assert [w.busy for w in engine.pool.workers] == [0, 0]
