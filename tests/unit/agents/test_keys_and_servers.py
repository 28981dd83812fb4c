"""Whose request it is, and which of several servers it goes to."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest
from slime_agent_base_url import AgentServer

from slime_core import Sample
from tests.agent_toys import PARAMS, ToyTokenizer
from tests.unit.engines.sglang.api.servers import Server, answer, engine_at, servers, sse, well
from tests.until import until

ASK: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("place", ["key", "X-Session-ID", "session_id", "user"])
async def test_every_endpoint_finds_the_key_where_clients_put_it(serve: Any, place: str) -> None:
    async with serve(["a", "b", "c"]) as (server, session, _):
        key = session.key if place == "key" else "EMPTY"
        headers = {place: session.key} if place.startswith("X-") else {}
        body = {"metadata": {"session_id": session.key}} if place == "session_id" else {}
        user = {"user": session.key} if place == "user" else {}
        async with (
            openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=key, default_headers=headers) as oai,
            anthropic.AsyncAnthropic(base_url=server.url, api_key=key, default_headers=headers) as ant,
        ):
            extra: Any = {"extra_body": body}
            chat = await oai.chat.completions.create(model="m", messages=ASK, **user, **extra)
            assert chat.choices[0].message.content == "a"
            response = await oai.responses.create(model="m", input="hi", **user, **extra)
            assert response.output_text == "b"
            metadata: Any = {"metadata": {"user_id": session.key}} if user else {}
            message = await ant.messages.create(model="m", max_tokens=9, messages=ASK, **metadata, **extra)
            assert message.content[0].text == "c"  # type: ignore[union-attr]
        assert session.turns == 3


async def test_an_agents_turns_go_to_the_server_that_had_the_first() -> None:
    """Whole or streamed, although another server is less busy by then; and routers are told the session, too."""
    free, tokenizer = asyncio.Event(), ToyTokenizer()

    async def react(server: Server, request: Any, body: Any, before: int) -> Any:
        if request.path != "/generate":
            return await well(server, request, body, before)
        if request.headers.get("x-smg-routing-key") == "other":
            await free.wait()
        said = answer(*tokenizer.encode("ok<|end|>"), reason="stop")
        return await sse(request, said) if body.get("stream") else said

    async with servers(react, react) as made, engine_at(*made) as engine:
        agents = AgentServer(engine, tokenizer)
        await agents.start()
        try:
            session = agents.open_session(Sample(index=0, prompt="p", session_id="mine"), PARAMS)
            other = asyncio.ensure_future(engine.generate([3], {}, session_id="other"))
            await until(lambda: any(server.asked("/generate") for server in made))
            busy = next(server for server in made if server.asked("/generate"))
            async with openai.AsyncOpenAI(base_url=agents.url + "/v1", api_key=session.key) as api:
                await api.chat.completions.create(model="m", messages=ASK)
                free.set()
                await other
                for _ in range(2):
                    await api.chat.completions.create(model="m", messages=ASK)
                    stream = await api.chat.completions.create(model="m", messages=ASK, stream=True)
                    assert [chunk async for chunk in stream]
        finally:
            await agents.stop()
        assert len(busy.asked("/generate")) == 1, "though it was idle again after the first turn"
        (idle,) = (server for server in made if server is not busy)
        keys = [headers["x-smg-routing-key"] for path, _, headers in idle.calls if path == "/generate"]
        assert keys == ["mine"] * 5
