"""Which fields of a request the real router of SGLang passes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from slime_engine_http.api import router as router_fields
from slime_engine_http.api.router import HARMLESS, Router
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker
from slime_engine_http.service import Place
from slime_engine_sglang.programs import RouterProcess

from tests.unit.engines.sglang.api.servers import Server, answer, servers

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]


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
