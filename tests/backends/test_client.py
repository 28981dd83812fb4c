"""The client against real SGLang servers and the real router: what only they can show.

What goes wrong on purpose and fast is in tests/unit/engines/sglang/api.
"""

from __future__ import annotations

import asyncio
import copy
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from slime_engine_http.api import router as router_fields
from slime_engine_http.api.engine import HttpEngine
from slime_engine_http.api.router import HARMLESS, Router
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker
from slime_engine_http.service import Place
from slime_engine_sglang.programs import RouterProcess

from slime_core.config import Args
from slime_core.errors import EngineError
from slime_core.sample import GenerationOutput
from tests.backends.conftest import Running
from tests.unit.engines.sglang.api.servers import Server, answer, servers

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]

PROMPT = [40, 41, 42, 43, 60, 61]
LONG = {"max_new_tokens": 480, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture
async def direct(sglang_pair: Running) -> AsyncIterator[HttpEngine]:
    """Both servers, without the router."""
    args = Args(
        rollout_external_engine_addrs=sglang_pair.urls, hf_checkpoint=str(sglang_pair.model), rollout_timeout=120.0
    )
    engine = HttpEngine(args)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def routed(sglang_pair: Running) -> AsyncIterator[HttpEngine]:
    """Both servers behind the router."""
    args = copy.copy(sglang_pair.args)
    args.rollout_timeout = 120.0
    engine = HttpEngine(args)
    await engine.start()
    yield engine
    await engine.stop()


def check_log_probs(model: Any, output: GenerationOutput, temperature: float = 1.0) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + output.token_ids])).logits[0].double() / temperature
    wanted = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1].gather(1, torch.tensor(output.token_ids)[:, None])[
        :, 0
    ]
    assert torch.allclose(wanted, torch.tensor(output.log_probs, dtype=torch.float64), atol=2e-5)


async def test_log_probs_are_those_of_transformers_both_ways(
    direct: HttpEngine, routed: HttpEngine, sglang_model: tuple[Path, Any]
) -> None:
    params = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.7}
    for engine in (direct, routed):
        outputs = await asyncio.gather(*(engine.generate(PROMPT, params, session_id=str(i)) for i in range(6)))
        for output in outputs:
            assert len(output.token_ids) == 24
            check_log_probs(sglang_model[1], output, 0.7)
            assert output.meta_info["finish_reason"]["type"] == "length"
            assert len(output.meta_info["token_weight_versions"]) == 24
    assert direct.take_metrics()["engine/retried_requests"] == 0
    assert routed.take_metrics()["engine/bypassed_router"] == 0


async def test_greedy_tokens_are_the_same_both_ways(direct: HttpEngine, routed: HttpEngine) -> None:
    params = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.0, "sampling_seed": 5}
    one, other = await direct.generate(PROMPT, params), await routed.generate(PROMPT, params)
    assert (one.token_ids, one.text) == (other.token_ids, other.text)
    assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert routed.take_metrics()["engine/bypassed_router"] == 0


async def test_streams_both_ways(direct: HttpEngine, routed: HttpEngine, sglang_model: tuple[Path, Any]) -> None:
    # So many that they come in parts, however late this process looks: a server sends what there is together.
    params = {"max_new_tokens": 96, "ignore_eos": True, "temperature": 1.0}
    for engine in (direct, routed):
        outputs = [output async for output in engine.stream(PROMPT, params)]
        assert len(outputs) > 2
        assert len(outputs[-1].token_ids) == 96
        check_log_probs(sglang_model[1], outputs[-1])


TRIES = 20
"""Of requests that may be over before they are seen to run, when this process looks late."""


async def running(engine: HttpEngine, count: int, tasks: Sequence[asyncio.Task[Any]] = ()) -> None:
    """Until so many run, or one of the tasks is over."""
    async with asyncio.timeout(60):
        while (await engine.info())["num_running"] < count and not any(task.done() for task in tasks):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("way", ["direct", "routed"])
async def test_abort_and_cancel_reach_the_servers(way: str, direct: HttpEngine, routed: HttpEngine) -> None:
    engine = direct if way == "direct" else routed
    # So many that they take seconds, whatever the machine: the model's context is short.
    tasks = [asyncio.create_task(engine.generate([*PROMPT, i], LONG, rid=f"{way}-{i}")) for i in range(64)]
    await running(engine, 4)
    await engine.abort(f"{way}-63")
    first = await asyncio.wait_for(tasks[63], 60)
    assert first.meta_info["finish_reason"]["type"] == "abort"
    assert len(first.token_ids) < 480
    tasks[62].cancel()
    await engine.abort()
    outputs = await asyncio.gather(*tasks[:62])
    assert {output.meta_info["finish_reason"]["type"] for output in outputs} == {"abort"}
    assert any(output.token_ids for output in outputs)
    async with asyncio.timeout(60):
        while (await engine.info())["num_running"]:
            await asyncio.sleep(0.02)


async def test_pause_holds_all_servers_and_the_cache_is_flushed_in_the_end(direct: HttpEngine) -> None:
    for _ in range(TRIES):
        tasks = [asyncio.create_task(direct.generate([*PROMPT, i], LONG)) for i in range(4)]
        await running(direct, 4, tasks)
        await direct.pause("in_place")
        done, _ = await asyncio.wait(tasks, timeout=1.0)
        if not done:
            break
        await direct.resume()
        await asyncio.gather(*tasks)
    assert not done
    await direct.resume()
    await direct.flush_cache()  # refused until they are done
    assert [len(output.token_ids) for output in await asyncio.gather(*tasks)] == [480] * 4


async def test_what_would_end_a_server_is_refused(direct: HttpEngine) -> None:
    for prompt, params, word in (
        ([5, 100_000], {}, "100000"),
        ([5], {"skip_special_tokens": {}}, "skip_special_tokens"),
        ([5], {"temprature": 1.0}, "temperature"),
        ([5], {"top_p": 7}, "top_p"),
    ):
        with pytest.raises(EngineError, match=word):
            await direct.generate(prompt, params)
    assert len((await direct.generate(PROMPT, {"max_new_tokens": 2, "ignore_eos": True})).token_ids) == 2


async def echo(server: Server, request: Any, body: Any, before: int) -> Any:
    """A worker that returns its request."""
    if request.path == "/generate":
        return answer(7) | {"echo": body}
    return {"model_path": "echo", "served_model_name": "echo", "is_generation": True, "tp_size": 1, "dp_size": 1}


FIELDS = {
    "text": "hi", "input_embeds": [[0.5]], "image_data": ["a"], "video_data": ["a"], "audio_data": ["a"],
    "modalities": ["image"], "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [1],
    "return_text_in_logprobs": True, "log_metrics": False, "return_hidden_states": True, "session_params": {"id": "a"},
    "lora_path": "l", "lora_id": "l", "custom_logit_processor": "c", "bootstrap_host": "h", "bootstrap_port": 1,
    "bootstrap_room": 2, "data_parallel_rank": 1, "conversation_id": "c", "background": True, "priority": 1,
    "extra_key": "e", "no_logs": True, "custom_labels": {"a": "b"}, "return_bytes": True, "return_entropy": True,
    "model": "echo", "rid": "x", "return_logprob": True, "stream": False, "input_ids": [1],
    # Of SGLang 0.5.23, and lost on the way:
    "session_id": "s", "mm_hashes": ["a"], "return_sampling_mask": True, "return_routed_experts": True,
    "routed_experts_start_len": 1, "return_indexer_topk": True, "routed_dp_rank": 0, "routing_key": "k",
    "require_reasoning": True, "max_thinking_tokens": 3, "return_prompt_token_ids": True,
    "mm_processor_kwargs": {"a": 1}, "sampling_logprobs_mode": "raw", "token_indices_to_pool": [1], "watermark": True,
    "return_flat_raw_output_top_logprobs": True, "kv_hints": {"a": 1},
}  # fmt: skip
PARAMS = {
    "max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0.75, "top_p": 0.5, "top_k": 5, "min_p": 0.25,
    "stop": ["a"], "stop_token_ids": [1], "ignore_eos": True, "frequency_penalty": 0.5, "presence_penalty": 0.5,
    "repetition_penalty": 1.5, "skip_special_tokens": False, "no_stop_trim": True, "n": 1, "json_schema": "{}",
    "regex": "a", "ebnf": "x", "sampling_seed": 7,
    # Lost on the way:
    "spaces_between_special_tokens": False, "stop_regex": ["x"], "structural_tag": "s", "custom_params": {"a": 1},
    "stream_interval": 3, "logit_bias": {"1": 0.5}, "beam_width": 2, "watermark": True,
}  # fmt: skip


async def test_which_fields_the_router_drops(sglang_python: Path, tmp_path: Path) -> None:
    """Fails with a router version that passes on others than `router.FIELDS` and `router.PARAMS`."""
    process = RouterProcess("echo", {}, Place(sglang_python, tmp_path, 60.0), device="cpu")
    http = Http(timeout=30.0)
    await http.open()
    try:
        await process.launch()
        async with servers(echo) as (worker,):
            router = Router(http, process.url)
            await router.add_worker(Worker(worker.url))
            assert await router.list_workers() == [worker.url]
            arrived_fields, arrived_params = set(), set()
            async with aiohttp.ClientSession() as session:

                async def sent(**body: Any) -> Any:
                    async with session.post(f"{process.url}/generate", json=body) as response:
                        assert response.status == 200, await response.text()
                        return (await response.json())["echo"]

                for name, value in FIELDS.items():
                    prompt = {} if name in ("text", "input_embeds") else {"input_ids": [1]}
                    if (await sent(**prompt | {name: value})).get(name) == value:
                        arrived_fields.add(name)
                for name, value in PARAMS.items():
                    echoed = (await sent(input_ids=[1], sampling_params={name: value}))["sampling_params"]
                    if echoed.get(name) == value:
                        arrived_params.add(name)
            assert arrived_fields == router_fields.FIELDS - {"sampling_params"}
            assert arrived_params == router_fields.PARAMS
            assert not arrived_params & HARMLESS
            await router.remove_worker(worker.url)
            assert await router.list_workers() == []
    finally:
        await http.close()
        await asyncio.to_thread(process.kill)


async def test_a_killed_server_loses_no_request(sglang_pair: Running) -> None:
    """The last test of this file: `sglang_pair` has to start the server again for whoever wants it after this."""
    args = Args(
        rollout_external_engine_addrs=sglang_pair.urls, hf_checkpoint=str(sglang_pair.model), rollout_timeout=120.0
    )
    engine = HttpEngine(args)
    await engine.start()
    victim = sglang_pair.servers[0]
    port = int(victim.url.rsplit(":", 1)[1])
    # Before there are requests: it takes a while to look through all processes of a machine, and answers end meanwhile.
    listening = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port}
    try:
        for _ in range(TRIES):
            tasks = [asyncio.create_task(engine.generate([*PROMPT, i], LONG)) for i in range(8)]
            await running(engine, 8, tasks)
            if not any(task.done() for task in tasks):
                break
            await asyncio.gather(*tasks)
        for pid in listening - {None}:
            psutil.Process(pid).send_signal(signal.SIGKILL)
        outputs = await asyncio.gather(*tasks)
        assert [len(o.token_ids) for o in outputs] == [480] * 8
        assert engine.take_metrics()["engine/retried_requests"] == 4
        assert len((await engine.generate(PROMPT, {"max_new_tokens": 2, "ignore_eos": True})).token_ids) == 2
    finally:
        await engine.stop()
        await asyncio.to_thread(victim.kill)  # what is left of it
