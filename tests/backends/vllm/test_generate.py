"""Requests to a real vLLM server, beyond the contract of engines (`test_conformance.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from slime_engine_vllm.engine import VllmEngine

from slime_core.errors import EngineError
from tests.backends.vllm.conftest import Started

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1800)]

PROMPT = [11, 9, 4, 12, 7]
LONG = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}


def run(started: Started, use: Callable[[VllmEngine], Awaitable[Any]], **flags: Any) -> Any:
    async def inside() -> Any:
        async with started(**flags) as engine:
            return await use(engine)

    return asyncio.run(inside())


def test_more_prompts_at_once_than_a_batch_has_tokens(started: Started) -> None:
    """On CPU vLLM ends when it splits a prompt that has a seed."""

    async def use(engine: VllmEngine) -> Any:
        def ask(number: int) -> Awaitable[Any]:
            params = {"max_new_tokens": 3, "temperature": 1.0, "sampling_seed": number, "ignore_eos": True}
            return engine.generate([3 + (number + i) % 200 for i in range(120)], params)

        return await asyncio.gather(*map(ask, range(64))), await ask(63)

    together, alone = run(started, use)
    assert [len(output.token_ids) for output in together] == [3] * 64
    assert together[-1].token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": 4}, "unknown key 'max_tokens'"),  # vLLM's own name, which the protocol does not have
        ({"temprature": 1.0}, "unknown key 'temprature'"),
        ({"stop_regex": "a+"}, "vLLM has no 'stop_regex'"),
        ({"n": 2}, "n is 2"),
        ({"top_p": 7}, "top_p"),
    ],
)
def test_parameters_that_vllm_would_ignore_are_refused(started: Started, wrong: dict[str, Any], said: str) -> None:
    async def use(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match=said):
            await engine.generate(PROMPT, {"max_new_tokens": 2, **wrong})
        assert engine.pool.ready, "a wrong request is not the server's fault"

    run(started, use)


def test_a_session_stays_on_its_server_and_others_on_the_least_busy(started: Started) -> None:
    """Two names of one server count as two."""

    async def use(engine: VllmEngine) -> tuple[list[str], int]:
        homes = []
        for _ in range(4):
            others = [asyncio.create_task(engine.generate(PROMPT, {"max_new_tokens": 20})) for _ in range(3)]
            await asyncio.sleep(0)
            worker = engine.pool.acquire("one")
            engine.pool.release(worker)
            homes.append(worker.url)
            await engine.generate(PROMPT, {"max_new_tokens": 2}, session_id="one")
            await asyncio.gather(*others)
        tasks = [asyncio.create_task(engine.generate(PROMPT, LONG, rid=f"c{i}")) for i in range(4)]
        while sum(worker.busy for worker in engine.pool.workers) < 4:
            await asyncio.sleep(0.01)
        most = max(worker.busy for worker in engine.pool.workers)
        await engine.abort()
        await asyncio.gather(*tasks)
        return homes, most

    homes, most = run(started, use, twice=True)
    assert len(set(homes)) == 1
    assert most == 2
