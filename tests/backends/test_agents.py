"""Agents by base URL with real SGLang servers behind the endpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from slime_agent_base_url import AgentServer
from slime_engine_http.api.engine import HttpEngine

from slime_core import Sample
from slime_core.config import Args
from slime_core.data.tokenizer import load_tokenizer
from tests.backends.conftest import Running

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]

TOKENS = 48
"""So many that they come in parts, however late this process looks."""
PARAMS = {
    "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 400, "ignore_eos": True, "skip_special_tokens": False,
    "no_stop_trim": True,
}  # fmt: skip
RUNS = 4


async def ask(api: openai.AsyncOpenAI, messages: list[Any]) -> tuple[list[str], Any]:
    """(pieces of the answer, its usage)."""
    stream = await api.chat.completions.create(
        model="policy", messages=messages, max_completion_tokens=TOKENS, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    pieces, usage = [], None
    async for chunk in stream:
        pieces += [c.delta.content for c in chunk.choices if c.delta.content]
        usage = chunk.usage or usage
    return pieces, usage


async def test_streamed_chats_are_trained_as_they_were_sampled(
    sglang_pair: Running, sglang_model: tuple[Path, Any]
) -> None:
    directory, model = sglang_model
    args = Args(rollout_external_engine_addrs=sglang_pair.urls, hf_checkpoint=str(directory), rollout_timeout=120.0)
    engine = HttpEngine(args)
    await engine.start()
    try:
        await check_streamed_chats(engine, directory, model, caches=True)
    finally:
        await engine.stop()


async def check_streamed_chats(engine: HttpEngine, directory: Path, model: Any, *, caches: bool) -> None:
    """Check samples of agents' chats against the model. `caches`: the servers tell how much of a prompt they had."""
    server = AgentServer(engine, load_tokenizer(directory))
    await server.start()

    async def run(number: int) -> Sample:
        sample = Sample(group_index=0, index=number, prompt="task", tokens=[3], session_id=f"agent {number}")
        session = server.open_session(sample, PARAMS)
        messages: list[Any] = [{"role": "user", "content": f"{number}{number} and what is more"}]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=session.key, max_retries=0) as api:
            pieces, first = await ask(api, messages)
            assert len(pieces) > 2
            messages += [{"role": "assistant", "content": "".join(pieces)}, {"role": "user", "content": "so?"}]
            _, second = await ask(api, messages)
        cached = second.prompt_tokens_details.cached_tokens
        assert cached >= first.prompt_tokens or not caches, "the conversation was not in the cache"
        (made,) = await server.finish_session(session.key, 1.0)
        return made

    try:
        samples = await asyncio.gather(*map(run, range(RUNS)))
    finally:
        await server.stop()
    for sample in samples:
        sample.validate()
        assert sample.metadata["agent"]["turns_trained"] == 2
        assert sample.loss_mask is not None
        assert sum(sample.loss_mask) == 2 * TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0].double()
        answers = sample.tokens[-sample.response_length :]
        told = torch.log_softmax(logits, -1)[-sample.response_length - 1 : -1]
        wanted = told.gather(1, torch.tensor(answers)[:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        log_probs = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
        torch.testing.assert_close(log_probs[mask], wanted[mask], atol=2e-5, rtol=0)
