"""Agents' sessions over a real vLLM server, through OpenAI's own client."""

from __future__ import annotations

import asyncio

import pytest
from slime_testing_contracts import engine_reference as reference
from slime_testing_contracts.tiny import tiny_model

from tests.backends.test_agents import check_streamed_chats
from tests.backends.vllm.conftest import Started

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]


def test_streamed_chats_are_trained_as_they_were_sampled(started: Started) -> None:
    async def inside() -> None:
        async with started() as engine:
            await check_streamed_chats(engine, tiny_model(), reference.model(), caches=False)

    asyncio.run(inside())
