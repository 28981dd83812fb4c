"""OpenAI's, Anthropic's, SGLang's and agents' APIs over a real vLLM server, through the vendors' own clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from slime_engine_vllm.engine import VllmEngine
from slime_testing_contracts import engine_reference as reference
from slime_testing_contracts.tiny import tiny_model

from tests.backends.test_agents import check_streamed_chats
from tests.backends.vllm.conftest import Started

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]
SAY: Any = [{"role": "user", "content": "hi"}]


def run(started: Started, use: Callable[[VllmEngine], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with started() as engine:
            await use(engine)

    asyncio.run(inside())


def test_streamed_chats_are_trained_as_they_were_sampled(started: Started) -> None:
    run(started, lambda engine: check_streamed_chats(engine, tiny_model(), reference.model(), caches=False))


def test_the_fronts_answer(started: Started) -> None:
    async def use(engine: VllmEngine) -> None:
        host, port = await engine.address()
        url = f"http://{host}:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as plain:
            body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
            answer = (await plain.post("/generate", json=body | {"return_logprob": True})).json()
            pairs = answer["meta_info"]["output_token_logprobs"]
            ids = [entry[1] for entry in pairs]
            expected = reference.log_probs([5, 6, 7], ids).tolist()
            assert [entry[0] for entry in pairs] == pytest.approx(expected, abs=5e-5)
            refused = await plain.post("/generate", json=body | {"return_logprob": True, "top_logprobs_num": 2})
            assert refused.status_code == 400
            assert "the vLLM engine does not support top_logprobs" in refused.text
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            ask: Any = {"model": "m", "messages": SAY, "max_tokens": 4}
            chat = await api.chat.completions.create(**ask, n=2, logprobs=True)
            assert len(chat.choices) == 2
            assert len(chat.choices[1].logprobs.content) == chat.usage.completion_tokens / 2 == 4
            stream = await api.chat.completions.create(**ask, stream=True)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
            assert (await api.completions.create(model="m", prompt="hi", max_tokens=4)).choices[0].text
            response = await api.responses.create(model="m", input="hi", max_output_tokens=4)
            assert response.usage is not None
            assert response.usage.output_tokens == 4
            with pytest.raises(openai.BadRequestError, match="best_of is 2"):
                await api.completions.create(model="m", prompt="hi", max_tokens=3, best_of=2, n=2)
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
            said: Any = {"model": "m", "max_tokens": 4, "messages": SAY}
            message = await claude.messages.create(**said)
            assert (message.usage.output_tokens, message.stop_reason) == (4, "max_tokens")
            async with claude.messages.stream(**said) as pieces:
                assert (await pieces.get_final_message()).usage.output_tokens == 4

    run(started, use)
