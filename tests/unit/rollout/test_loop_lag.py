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


def test_p99_leaves_one_late_look_in_many_out() -> None:
    lag = LoopLag()
    lag._lags = [0.001] * 199 + [5.0]
    found = lag.take()
    assert (found["perf/event_loop_lag_p99"], found["perf/event_loop_lag_max"]) == (0.001, 5.0)
    assert lag.take() == {}


async def test_a_loop_with_a_time_of_its_own_is_not_measured() -> None:
    lag = LoopLag(counts=False)
    with lag.counting():
        await asyncio.sleep(2 * INTERVAL)
    assert lag.take() == {}
