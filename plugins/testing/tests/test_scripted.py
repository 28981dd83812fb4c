from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from slime_testing_contracts import Reply, Request, ScriptedEngine

from slime_core.errors import EngineError
from slime_core.sample import GenerationOutput


def ask(engine: ScriptedEngine, text: str = "hi", **params: Any) -> Awaitable[GenerationOutput]:
    return engine.generate(engine.tokenizer.encode(text), params, rid="r", session_id="s")


async def test_replies_come_in_order_and_run_out() -> None:
    engine = ScriptedEngine(["one", Reply("two", finish="length", log_probs=(-1.0, -2.0, -3.0))], weight_version=4)
    first = await ask(engine, "p")
    assert first.text == "one"
    assert len(first.token_ids) == 4  # with the end token
    assert first.meta_info["finish_reason"] == {"type": "stop"}
    assert first.meta_info["token_weight_versions"] == [4] * 4
    second = await ask(engine)
    assert second.log_probs == [-1.0, -2.0, -3.0]
    with pytest.raises(EngineError, match="no reply for call 3"):
        await ask(engine)
    assert engine.requests[0] == Request(engine.tokenizer.encode("p"), {}, "r", "s")


async def test_an_abort_cuts_a_delayed_reply_and_a_pause_holds_the_next() -> None:
    engine = ScriptedEngine([Reply("abcdef", delay=30.0), "next"])
    running = asyncio.ensure_future(ask(engine))
    while not engine.requests:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    await engine.abort()
    cut = await asyncio.wait_for(running, 60)
    assert (cut.text, cut.meta_info["finish_reason"]) == ("abc", {"type": "abort"})
    await engine.pause()
    waiting = asyncio.ensure_future(ask(engine))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await engine.resume()
    assert (await asyncio.wait_for(waiting, 60)).text == "next"


async def test_weights_are_kept_and_summed() -> None:
    torch = pytest.importorskip("torch")
    engine = ScriptedEngine([])
    weight = torch.arange(6.0)
    await engine.update_weights_from_tensor([("w", weight)], 3)
    before = await engine.weight_checksums()
    weight += 1
    assert await engine.weight_checksums() == before
    assert (await engine.info())["weight_version"] == 3


async def test_an_abort_by_name_ends_that_request_only() -> None:
    engine = ScriptedEngine(lambda request: Reply("abcdefgh", until=released))
    released = asyncio.Event()
    tasks = [asyncio.ensure_future(engine.generate([1], {}, rid=name)) for name in ("a", "b")]
    while len(engine.requests) < 2:
        await asyncio.sleep(0)
    await engine.abort("a")
    aborted = await tasks[0]
    assert (aborted.text, aborted.meta_info["finish_reason"]) == ("abcd", {"type": "abort"})
    assert not tasks[1].done()
    released.set()
    assert (await tasks[1]).text == "abcdefgh"


async def test_weights_that_change_in_the_middle_of_an_answer() -> None:
    released = asyncio.Event()
    engine = ScriptedEngine([Reply("abcde", until=released), Reply("ab", weight_versions=(1, 9))], weight_version=3)
    task = asyncio.ensure_future(engine.generate([1], {}))
    while not engine.requests:
        await asyncio.sleep(0)
    await engine.update_weights_from_tensor([], 4)
    released.set()
    meta = (await task).meta_info
    assert meta["token_weight_versions"] == [3, 3, 4, 4, 4]
    assert meta["weight_version"] == "4"
    assert (await engine.generate([1], {})).meta_info["token_weight_versions"] == [1, 9]
