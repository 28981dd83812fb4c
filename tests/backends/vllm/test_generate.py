"""Tokens in, tokens out over a real vLLM server: log-probs, seeds, ends, aborts, streams and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from slime_engine_vllm.engine import VllmEngine
from slime_testing_contracts import engine_reference as reference

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


def gap(output: Any, temperature: float) -> float:
    expected = reference.log_probs(PROMPT, output.token_ids, temperature=temperature).tolist()
    return max(abs(a - b) for a, b in zip(output.log_probs, expected, strict=True))


def test_log_probs_are_those_of_the_temperature(started: Started) -> None:
    async def use(engine: VllmEngine) -> Any:
        params = {"max_new_tokens": 24, "ignore_eos": True}
        each = [engine.generate(PROMPT, {**params, "temperature": t}) for t in (0.7, 1.0, 1.3)]
        return await asyncio.gather(*each)

    cold, plain, warm = run(started, use)
    assert max(gap(cold, 0.7), gap(plain, 1.0), gap(warm, 1.3)) < 5e-5
    assert gap(cold, 1.0) > 1e-2, "a server setting: without it log-probs are those of temperature 1"
    assert cold.text == reference.tokenizer().decode(cold.token_ids, skip_special_tokens=True)
    assert cold.meta_info["prompt_tokens"] == len(PROMPT)


def test_a_seed_decides_and_ends_are_told(started: Started) -> None:
    async def use(engine: VllmEngine) -> Any:
        params = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": True}
        first, again = await asyncio.gather(*(engine.generate(PROMPT, params) for _ in range(2)))
        stop = first.token_ids[4]
        ended = await engine.generate(PROMPT, {**params, "stop_token_ids": [stop]})
        longer = await engine.generate(PROMPT, {**params, "stop_token_ids": [stop], "min_new_tokens": 8})
        biased = await engine.generate(PROMPT, {**params, "logit_bias": {"42": 100.0}})
        other = await engine.generate(PROMPT, {**params, "sampling_seed": 6})
        return first, again, ended, longer, biased, other

    first, again, ended, longer, biased, other = run(started, use)
    assert (first.token_ids, first.log_probs) == (again.token_ids, pytest.approx(again.log_probs, abs=1e-5))
    assert other.token_ids != first.token_ids
    assert first.meta_info["finish_reason"] == {"type": "length", "length": 12}
    at = first.token_ids.index(first.token_ids[4])
    assert ended.token_ids == first.token_ids[: at + 1]
    assert ended.meta_info["finish_reason"] == {"type": "stop", "matched": first.token_ids[4]}
    assert len(longer.token_ids) >= 8
    assert biased.token_ids == [42] * 12


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


def test_streams_and_aborts(started: Started) -> None:
    async def use(engine: VllmEngine) -> Any:
        seen = [output async for output in engine.stream(PROMPT, {"max_new_tokens": 6, "ignore_eos": True})]
        streamed = []
        async for output in engine.stream(PROMPT, LONG, rid="a"):
            streamed.append(output)
            if len(output.token_ids) > 4 and len(streamed) == 5:
                await engine.abort("a")
        tasks = [asyncio.create_task(engine.generate(PROMPT, LONG, rid=f"b{i}")) for i in range(3)]
        while (await engine.info())["num_running"] < 3:
            await asyncio.sleep(0.01)
        await engine.abort("b1")
        one = await tasks[1]
        await engine.abort()
        return seen, streamed[-1], one, await asyncio.gather(*tasks)

    seen, streamed, one, all_ = run(started, use)
    assert [len(output.token_ids) for output in seen] == sorted(len(output.token_ids) for output in seen)
    assert len(seen[-1].token_ids) == 6
    assert gap(seen[-1], 1.0) < 5e-5
    for output in (streamed, one, *all_):
        assert output.meta_info["finish_reason"]["type"] == "abort"
        assert len(output.token_ids) < 400
        assert gap(output, 1.0) < 5e-5


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
