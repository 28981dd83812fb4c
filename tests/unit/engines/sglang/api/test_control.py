from __future__ import annotations

from typing import Any

import pytest
from slime_engine_http.api.worker import WorkerState

from slime_core.errors import EngineError
from tests.unit.engines.sglang.api.servers import Reaction, Server, await_all, die, engine_at, servers, well


def at(path: str, *given: Any, then: Reaction = well) -> Reaction:
    """These answers at `path`, one after the other; `then` afterwards and elsewhere."""

    async def react(server: Server, request: Any, body: Any, before: int) -> Any:
        mine = request.path == path and before < len(given)
        reaction = given[before] if mine else None
        if callable(reaction):
            return await reaction(server, request, body, before)
        return reaction if mine else await then(server, request, body, before)

    return react


async def test_every_server_is_told() -> None:
    async with servers(well, well, well) as made, engine_at(*made) as engine:
        await engine.abort("x")
        await engine.abort()
        await engine.pause("retract")
        assert engine.pool.paused
        await engine.resume()
        assert not engine.pool.paused
        await engine.flush_cache()
        await engine.release_memory()
        assert engine.pool.paused
        await engine.resume_memory(["weights"])
        assert engine.pool.paused
        await engine.resume_memory(["kv_cache"])
        assert not engine.pool.paused
        for server in made:
            assert server.asked("/abort_request") == [{"rid": "x~"}, {"abort_all": True}]
            assert server.asked("/pause_generation") == [{"mode": "retract"}]
            assert len(server.asked("/continue_generation")) == len(server.asked("/flush_cache")) == 1
            assert server.asked("/release_memory_occupation") == [{}]
            assert server.asked("/resume_memory_occupation") == [{"tags": ["weights"]}, {"tags": ["kv_cache"]}]


async def test_pause_modes() -> None:
    refusing = at("/pause_generation", (422, {"error": {"message": "mode: unexpected value"}}))
    async with servers(refusing) as (server,), engine_at(server) as engine:
        with pytest.raises(EngineError, match="'sideways'; allowed: abort, in_place, retract"):
            await engine.pause("sideways")
        assert server.asked("/pause_generation") == []
        with pytest.raises(EngineError, match=r"does not take pause mode 'retract'.*unexpected value"):
            await engine.pause("retract")
        assert engine.pool.workers[0].state is WorkerState.READY


@pytest.mark.parametrize("recovering", [True, False])
async def test_a_server_that_fails_what_must_reach_all_is_taken_out(recovering: bool) -> None:
    failing = at("/pause_generation", *[die] * 4)
    async with servers(failing, well) as (bad, good), engine_at(bad, good) as engine:
        await_all(engine.pool, recovering)
        if recovering:
            await engine.pause()
        else:
            with pytest.raises(EngineError, match=bad.address):
                await engine.pause()
        assert [w.state.value for w in engine.pool.workers] == ["quarantined", "ready"]
        assert good.asked("/pause_generation") == [{"mode": "in_place"}]
        await engine.resume()
        assert bad.asked("/continue_generation") == []


async def test_a_server_that_an_earlier_run_left_paused_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def paused(server: Server, request: Any, body: Any, before: int) -> Any:
        if request.path == "/health" and not server.asked("/continue_generation"):
            return 503, b""
        return await well(server, request, body, before)

    async with servers(paused, well) as made, engine_at(*made) as engine:
        assert len(engine.pool.ready) == 2
        assert [len(server.asked("/continue_generation")) for server in made] == [1, 0]
    (told,) = [message for message in caplog.messages if "its weights may be a mixture" in message]
    assert made[0].url in told


@pytest.mark.parametrize("recovering", [False, True])
async def test_an_abort_does_not_fail_for_a_server_that_is_gone(recovering: bool) -> None:
    async with servers(well, well) as (gone, good), engine_at(gone, good) as engine:
        await_all(engine.pool, recovering)
        await gone.stop()
        await engine.abort()
        assert [w.state.value for w in engine.pool.workers] == ["quarantined", "ready"]
        assert good.asked("/abort_request") == [{"abort_all": True}]
        await good.stop()
        await engine.abort()  # who is gone has no requests any more
        assert [w.url for w in engine.pool.ready] == ([] if recovering else [good.url])


async def test_a_server_that_takes_no_abort_is_brought_back_or_told_of() -> None:
    async with servers(at("/abort_request", *[die] * 99), well) as made, engine_at(*made) as engine:
        with pytest.raises(EngineError, match="abort_request"):
            await engine.abort()
        assert len(engine.pool.ready) == 2
        await_all(engine.pool)
        await engine.abort()
        assert [w.state.value for w in engine.pool.workers] == ["quarantined", "ready"]
