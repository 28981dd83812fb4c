from __future__ import annotations

import asyncio
import time

from slime_runs.loop_lag import INTERVAL, LoopLag


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_callback_that_computes_is_lag_and_told_apart_from_one_that_sleeps() -> None:
    async def body(work: object) -> dict[str, float]:
        lag = LoopLag()
        with lag.counting():
            await asyncio.sleep(2 * INTERVAL)
            work(0.2)  # type: ignore[operator]
            await asyncio.sleep(2 * INTERVAL)
        return lag.take()

    computed, slept = asyncio.run(body(busy)), asyncio.run(body(time.sleep))
    assert computed["perf/event_loop_lag_max"] >= 0.2 - INTERVAL
    assert computed["perf/event_loop_lag_cpu_max"] >= 0.2 - INTERVAL
    assert slept["perf/event_loop_lag_max"] >= 0.2 - INTERVAL
    assert slept["perf/event_loop_lag_cpu_max"] < 0.1
