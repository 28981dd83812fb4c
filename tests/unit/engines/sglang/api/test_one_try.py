"""What ends a try from outside: its server is taken out, its time is over, its caller is cancelled, or two of these."""

from __future__ import annotations

import asyncio
import time

import pytest
from slime_engine_http.api.worker import WorkerState

from slime_core.errors import EngineError
from tests.unit.engines.sglang.api.servers import engine_at, generating, hang, servers, well
from tests.until import until


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
