"""Which protocol a server speaks, and that the other one is refused."""

from __future__ import annotations

from typing import Any

import pytest
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.weights.protocol import (
    ServerFacts,
    begin_update,
    call,
    end_update,
    served_version,
    server_facts,
)

from slime_core.errors import EngineError
from tests.unit.engines.sglang_api.servers import servers
from tests.unit.engines.sglang_api.weight_servers import WeightServer


@pytest.mark.parametrize(
    ("software", "sessions", "sglang"),
    [("0.5.20", False, True), ("0.5.20.post1", False, True), ("0.5.9", False, True),
     ("0.5.21", True, True), ("0.5.21rc1", True, True), ("v0.6.0", True, True), ("1.0", True, True),
     ("slime 9.9.9", False, False), ("", False, False)],
)  # fmt: skip
def test_protocol_by_version(software: str, sessions: bool, sglang: bool) -> None:
    assert ServerFacts(software).has_sessions is sessions
    assert ServerFacts(software).is_sglang is sglang


@pytest.mark.parametrize("software", ["0.5.20", "0.5.23"])
async def test_the_chosen_protocol_is_taken_and_the_other_refused(software: str) -> None:
    rules = WeightServer(software)
    async with servers(rules) as (server,):
        http = Http()
        await http.open()
        facts = await server_facts(http, server.url)
        other = ServerFacts("0.5.20" if software == "0.5.23" else "0.5.23")
        await begin_update(http, server.url, facts, timeout=5)
        assert rules.session == facts.has_sessions
        await end_update(http, server.url, facts, timeout=5)
        assert not rules.session
        rules.paused = "abort"

        async def _update_as(facts: ServerFacts) -> None:
            body: dict[str, Any] = {"serialized_named_tensors": [""], "weight_version": None}
            await begin_update(http, server.url, facts, timeout=5)
            await call(http, server.url, "/update_weights_from_tensor", body, timeout=5)

        with pytest.raises(EngineError, match=r"session|must run between"):
            await _update_as(other)
        await http.close()


async def test_a_server_that_tells_no_version_is_an_error() -> None:
    async def silent(server: Any, request: Any, body: Any, before: int) -> Any:
        return {}

    async with servers(silent) as (server,):
        http = Http()
        await http.open()
        with pytest.raises(EngineError, match="does not say which weight version"):
            await served_version(http, server.url)
        await http.close()
