"""Which protocol a server speaks, and that the other one is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.weights import round
from slime_engine_http.weights.protocol import ServerFacts, served_version
from slime_engine_http.weights.round import Round

from slime_core.errors import EngineError, WeightSyncError
from tests.unit.engines.sglang.api.servers import servers
from tests.unit.engines.sglang.api.weight_servers import WeightServer


@pytest.mark.parametrize(
    ("software", "sessions", "sglang"),
    [("0.5.20", False, True), ("0.5.20.post1", False, True), ("0.5.9", False, True),
     ("0.5.21", True, True), ("0.5.21rc1", True, True), ("v0.6.0", True, True), ("1.0", True, True),
     ("slime 9.9.9", False, False), ("", False, False)],
)  # fmt: skip
def test_protocol_by_version(software: str, sessions: bool, sglang: bool) -> None:
    assert ServerFacts(software).has_sessions is sessions
    assert ServerFacts(software).is_atomic is not sglang


@pytest.mark.parametrize("software", ["0.5.20", "0.5.23"])
async def test_the_chosen_protocol_is_taken_and_the_other_refused(
    software: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, sessions = WeightServer(software), list[bool]()
    async with servers(rules) as (server,), Http() as http:
        worker = Worker(server.url, state=WorkerState.READY)

        async def update(*, sends: bool) -> None:
            made = Round(
                http, WorkerPool([worker]), [worker], version=1, transport="tensor", timeout=5.0, tolerant=False
            )

            async def push(_: Round) -> None:
                sessions.append(rules.session)
                body = {"serialized_named_tensors": [""], "weight_version": None}
                if sends:
                    await made.each("sending", lambda w: made.load(w, "/update_weights_from_tensor", body))

            await made.take(push)

        with pytest.raises(WeightSyncError, match="reports weight version 'default'"):
            await update(sends=False)
        assert (sessions, rules.session) == ([software == "0.5.23"], False)
        other = ServerFacts("0.5.20" if software == "0.5.23" else "0.5.23")
        monkeypatch.setattr(round, "server_facts", lambda *_: asyncio.sleep(0, other))
        with pytest.raises(WeightSyncError, match=r"session|must run between"):
            await update(sends=True)


async def test_a_server_that_tells_no_version_is_an_error() -> None:
    async def silent(server: Any, request: Any, body: Any, before: int) -> Any:
        return {}

    async with servers(silent) as (server,):
        http = Http()
        await http.open()
        with pytest.raises(EngineError, match="does not say which weight version"):
            await served_version(http, server.url)
        await http.close()
