"""A vLLM server that the run launched: killed, hung, and killed in the middle of an update."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from slime_engine_http.api.worker import WorkerState
from slime_engine_vllm.engine import VllmEngine
from slime_testing_contracts import engine_reference as reference

from slime_core.config import Args
from tests.backends.whole_runs import command_line, still_running

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1800)]

PROMPT = [11, 9, 4, 12, 7]
PARAMS = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
NEW = 1.25


def gap(output: Any, scale: float) -> float:
    expected = reference.log_probs(PROMPT, output.token_ids, scale=scale).tolist()
    return max(abs(a - b) for a, b in zip(output.log_probs, expected, strict=True))


def processes(engine: VllmEngine) -> list[psutil.Process]:
    """The processes of the server, the first one first."""
    (guarded,) = engine.supervised[0].servers.values()
    assert guarded.pid is not None
    lines = [(found, command_line(found)) for found in psutil.Process(guarded.pid).children(recursive=True)]
    first = next(process for process, line in lines if "serve.py" in line and "guard.py" not in line)
    return [first, *first.children(recursive=True)]


async def until_back(engine: VllmEngine, restarts: int) -> None:
    async with asyncio.timeout(1200):
        while True:
            told = engine.take_metrics()
            restarts -= int(told["engine/restarts"])
            (worker,) = engine.pool.workers
            if restarts <= 0 and worker.state is WorkerState.READY:
                return
            assert worker.state is not WorkerState.LOST, worker.reason
            await asyncio.sleep(0.2)


def test_a_server_killed_hung_and_lost_in_an_update_comes_back_with_the_weights(
    vllm_args: Callable[..., Args], tmp_path: Path
) -> None:
    """Requests wait for it; nothing is left of the processes that were killed."""
    args = vllm_args(
        tmp_path,
        rollout_num_gpus=1,
        use_fault_tolerance=True,
        rollout_max_engine_restarts=3,
        rollout_health_check_interval=1,
        rollout_health_check_first_wait=1,
        rollout_health_check_timeout=60,
    )

    async def use(engine: VllmEngine) -> None:
        await engine.update_weights_from_tensor(reference.weights(NEW).items(), 1)

        # Killed while it generates: the request is answered by its successor, which has the weights.
        task = asyncio.create_task(engine.generate(PROMPT, {**PARAMS, "max_new_tokens": 400}))
        while (await engine.info())["num_running"] < 1:
            await asyncio.sleep(0.01)
        before = processes(engine)
        os.kill(before[0].pid, signal.SIGKILL)
        output = await task
        assert gap(output, NEW) < 5e-5
        assert set(output.meta_info["token_weight_versions"]) == {1}
        await until_back(engine, 1)
        assert still_running(before) == []

        # Hung: /health still answers, as the process that answers it runs.
        core = next(process for process in processes(engine) if "EngineCore" in command_line(process))
        core.suspend()
        output = await engine.generate(PROMPT, PARAMS)
        assert gap(output, NEW) < 5e-5
        await until_back(engine, 1)

        # Killed when an update has opened its session: the update ends without it, and it comes back with the update.
        first = processes(engine)[0]
        sent = list(reference.weights().items())

        def weights() -> Any:
            yield from sent[:-1]
            first.kill()
            yield sent[-1]

        await engine.update_weights_from_tensor(weights(), 2)
        output = await engine.generate(PROMPT, PARAMS)
        assert gap(output, 1.0) < 5e-5
        assert set(output.meta_info["token_weight_versions"]) == {2}

    run(args, use)


def run(args: Args, use: Callable[[VllmEngine], Awaitable[None]]) -> None:
    async def inside() -> None:
        engine = VllmEngine(args)
        await engine.start()
        begun = processes(engine)
        try:
            await use(engine)
        finally:
            begun += processes(engine)
            await engine.stop()
        assert still_running(begun) == []

    asyncio.run(inside())
