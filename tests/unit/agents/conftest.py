"""A server in the test's event loop, with one session open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from slime_agent_base_url import AgentServer, SessionLimits
from slime_testing_contracts import ScriptedEngine
from slime_tool_parsers.hermes import Hermes

from slime_core import Sample
from tests.agent_toys import PARAMS, StreamingEngine, ToyTokenizer


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`async with serve(script) as (server, session, engine)`; `limits=...`, `stream=True`."""

    @asynccontextmanager
    async def serving(
        script: Any,
        *,
        stream: bool = False,
        limits: SessionLimits | None = None,
        params: Mapping[str, Any] = PARAMS,
        evaluation: bool = False,
    ) -> AsyncIterator[Any]:
        tokenizer = ToyTokenizer()
        engine = (StreamingEngine if stream else ScriptedEngine)(script, tokenizer=tokenizer, weight_version=3)
        server = AgentServer(engine, tokenizer, parser=Hermes())
        await server.start()
        base = Sample(group_index=0, index=7, prompt="task", tokens=tokenizer.encode("task"), session_id="s")
        session = server.open_session(base, params, limits=limits, evaluation=evaluation)
        try:
            yield server, session, engine
        finally:
            await server.stop()

    return serving
