from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from slime_engine_http.api import client as client_module
from slime_engine_http.api.client import Client
from slime_engine_http.api.engine import HttpEngine
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState

from slime_core.config import Args
from slime_core.errors import ConfigError, EngineError
from slime_core.sample import GenerationOutput
from tests.unit.engines.sglang.api.servers import (
    Reaction,
    Server,
    answer,
    await_all,
    die,
    engine_at,
    generating,
    hang,
    servers,
    sse,
    well,
)
from tests.until import until


def first(*given: Any) -> Reaction:
    """These, then the right answer."""

    async def react(server: Server, request: Any, body: Any, before: int) -> Any:
        return given[before] if before < len(given) else answer(server.number)

    return generating(react)


# -- one server ------------------------------------------------------------------------------------------


async def test_one_server_gets_four_tries_under_names_of_which_none_begins_another() -> None:
    """SGLang aborts every request whose name begins with that of a lost connection's."""
    async with servers(first((503, {}), (429, {}), (200, b"nonsense"))) as (server,), engine_at(server) as engine:
        assert (await engine.generate([3], {})).token_ids == [0]
        names = [body["rid"] for body in server.asked("/generate")]
        assert [b.startswith(a) for a in names for b in names] == [a is b for a in names for b in names]
        assert len(names) == 4
        assert engine.take_metrics()["engine/retried_requests"] == 3
        assert engine.take_metrics()["engine/retried_requests"] == 0


@pytest.mark.parametrize(("status", "calls"), [(400, 1), (404, 1), (500, 4)])
async def test_refusals_are_final_and_patience_ends(status: int, calls: int) -> None:
    refused = [(status, {"error": {"message": f"no {n}"}}) for n in range(9)]
    async with servers(first(*refused)) as (server,), engine_at(server) as engine:
        with pytest.raises(EngineError, match=f"/generate: status {status}: no {calls - 1}"):
            await engine.generate([3], {})
        assert len(server.asked("/generate")) == calls


# -- several servers ---------------------------------------------------------------------------------------


async def test_requests_spread_and_sessions_stick() -> None:
    async with servers(well, well, well) as made, engine_at(*made) as engine:
        await asyncio.gather(*(engine.generate([3], {}) for _ in range(9)))
        assert [len(s.asked("/generate")) for s in made] == [3, 3, 3]
        for _ in range(4):
            await engine.generate([3], {}, session_id="a")
        assert sorted(len(s.asked("/generate")) for s in made) == [3, 3, 7]


@pytest.mark.parametrize("fault", [die, first(*[(500, {})] * 9), first(*[(200, {"hello": 1})] * 9)])
async def test_a_failure_is_tried_elsewhere(fault: Reaction) -> None:
    async with servers(generating(fault), well) as (bad, good), engine_at(bad, good) as engine:
        outputs = await asyncio.gather(*(engine.generate([3], {}) for _ in range(8)))
        assert {o.token_ids[0] for o in outputs} == {1}
        assert 1 <= len(bad.asked("/generate")) <= 8
        assert len(good.asked("/generate")) == 8
        assert engine.take_metrics()["engine/retried_requests"] == len(bad.asked("/generate"))
        assert {w.busy for w in engine.pool.workers} == {0}


async def test_a_dead_server_is_tried_once_not_for_every_request() -> None:
    async with servers(well, well) as (gone, good), engine_at(gone, good) as engine:
        await gone.stop()
        for _ in range(5):
            assert (await engine.generate([3], {})).token_ids == [1]
        metrics = engine.take_metrics()
        assert 1 <= metrics["engine/retried_requests"] <= 2  # a connection kept from before breaks first
        assert metrics["engine/quarantined"] == 1
        assert metrics["engine/ready_workers"] == 1
        assert metrics["engine/requests"] == 5


async def test_the_only_server_stays_in_until_somebody_brings_servers_back() -> None:
    async with servers(well) as (only,), engine_at(only, rollout_timeout=5.0) as engine:
        await only.stop()
        with pytest.raises(EngineError, match="Cannot connect"):
            await engine.generate([3], {})
        (worker,) = engine.pool.workers
        assert worker.state is WorkerState.READY
        await_all(engine.pool)
        waiting = asyncio.create_task(engine.generate([3], {}))
        await until(lambda: worker.state is WorkerState.QUARANTINED)
        await only.start()
        worker.url = only.url
        engine.pool.set_state(worker, WorkerState.READY)
        assert (await waiting).token_ids == [0]


async def test_a_request_that_ends_servers_is_given_to_four_only() -> None:
    async with servers(*[generating(die)] * 6) as made, engine_at(*made) as engine:
        await_all(engine.pool)
        with pytest.raises(EngineError, match="Disconnected"):
            await engine.generate([3], {})
        assert [len(s.asked("/generate")) for s in made] == [1, 1, 1, 1, 0, 0]


async def test_requests_wait_for_a_server_until_their_deadline() -> None:
    async with servers(well) as (server,), engine_at(server, rollout_timeout=0.4) as engine:
        (worker,) = engine.pool.workers
        engine.pool.set_state(worker, WorkerState.QUARANTINED, "hung")
        with pytest.raises(EngineError, match=r"no engine is ready.*hung\)$"):
            await engine.generate([3], {})
        await_all(engine.pool)
        with pytest.raises(EngineError, match=r"hung\); waited 0.4 s \(--rollout-timeout\)"):
            await engine.generate([3], {})
    async with servers(well) as (server,), engine_at(server) as engine:
        (worker,) = engine.pool.workers
        await_all(engine.pool)
        engine.pool.set_state(worker, WorkerState.QUARANTINED, "hung")
        task = asyncio.create_task(engine.generate([3], {}))
        await asyncio.sleep(0)
        # As the supervisor does it: in another thread.
        thread = threading.Thread(target=engine.pool.set_state, args=(worker, WorkerState.READY))
        thread.start()
        assert (await task).token_ids == [0]
        thread.join()


async def test_requests_at_a_server_that_is_taken_out_go_elsewhere() -> None:
    async with servers(generating(hang), well) as (hung, good), engine_at(hung, good) as engine:
        tasks = [asyncio.create_task(engine.generate([3], {}, session_id=str(i))) for i in range(6)]
        await until(lambda: len(hung.asked("/generate")) == 3)
        worker = next(w for w in engine.pool.workers if w.url == hung.url)
        thread = threading.Thread(target=engine.pool.set_state, args=(worker, WorkerState.QUARANTINED, "hung"))
        thread.start()
        assert {o.token_ids[0] for o in await asyncio.gather(*tasks)} == {1}
        thread.join()
        assert engine.take_metrics()["engine/retried_requests"] == 3
        assert (worker.busy, worker.state) == (0, WorkerState.QUARANTINED)


async def test_every_request_has_its_own_deadline() -> None:
    async with servers(generating(hang)) as (server,), engine_at(server, rollout_timeout=0.4) as engine:
        began, ended = time.monotonic(), []

        async def one(delay: float) -> None:
            await asyncio.sleep(delay)
            with pytest.raises(EngineError, match=r"no answer within 0.4 s \(--rollout-timeout\)"):
                await engine.generate([3], {})
            ended.append(time.monotonic() - began - delay)

        await asyncio.gather(one(0.0), one(0.2), one(0.3))
        assert len(ended) == 3
        assert all(0.39 < seconds < 10 for seconds in ended), ended
        assert engine.pool.workers[0].state is WorkerState.READY
        assert engine.pool.workers[0].busy == 0


async def test_a_caller_who_is_cancelled_while_its_server_is_taken_out_is_cancelled() -> None:
    async with servers(generating(hang), well) as (hung, good), engine_at(hung, good) as engine:
        task = asyncio.create_task(engine.generate([3], {}))
        await until(lambda: hung.asked("/generate"))
        engine.pool.set_state(engine.pool.workers[0], WorkerState.QUARANTINED, "hung")
        engine._running()._flights._take_note(engine.pool.workers[0])  # cut now, ...
        task.cancel()  # ... and cancelled before the task turns
        with pytest.raises(asyncio.CancelledError):
            await task
        assert good.asked("/generate") == []
        assert engine.pool.workers[0].busy == 0


# -- weight versions -------------------------------------------------------------------------------------


def version(name: str, **meta: Any) -> Reaction:
    async def react(server: Server, request: Any, body: Any, before: int) -> Any:
        if request.path == "/model_info":
            return {"weight_version": name}
        return answer(server.number, version=name, **meta) if request.path == "/generate" else {}

    return react


@pytest.mark.parametrize("lie", ["4", "6", "default"])
async def test_answers_of_other_weights_are_not_returned(lie: str) -> None:
    async with servers(version(lie), version("5")) as (liar, good), engine_at(liar, good) as engine:
        assert (await engine.generate([3], {}, session_id="a")).token_ids == [0]  # no version is wanted yet
        engine.pool.version_wanted = 5
        outputs = await asyncio.gather(*(engine.generate([3], {}) for _ in range(4)))
        assert {o.token_ids[0] for o in outputs} == {1}
        assert [w.state.value for w in engine.pool.workers] == ["quarantined", "ready"]
        assert "wanted is 5" in engine.pool.workers[0].reason
        metrics = engine.take_metrics()
        # The second one may have been cut when the first one's answer came.
        assert 1 <= metrics["engine/wrong_version_answers"] <= metrics["engine/retried_requests"] == 2
        assert (await engine.generate([3], {}, session_id="a")).token_ids == [1]
        assert liar.asked("/abort_request") == []
        assert good.asked("/abort_request") == []


# -- aborting and cancelling -------------------------------------------------------------------------------


async def test_a_cancelled_caller_aborts_its_request_where_it_is() -> None:
    async with servers(generating(hang), generating(hang)) as made, engine_at(*made) as engine:
        task = asyncio.create_task(engine.generate([3], {}, rid="mine"))
        await until(lambda: any(s.asked("/generate") for s in made))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        there = [bool(s.asked("/generate")) for s in made]
        assert [s.asked("/abort_request") for s in made] == [[{"rid": "mine~"}] if t else [] for t in there]
        assert {w.busy for w in engine.pool.workers} == {0}


async def test_what_comes_in_a_pause_waits_here_where_an_abort_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_LOOK_AGAIN_S", 60.0)
    async with servers(well) as (server,), engine_at(server) as engine:
        await engine.pause()
        tasks = [asyncio.create_task(engine.generate([3], {}, rid=f"r{i}")) for i in range(2)]
        done, _ = await asyncio.wait(tasks, timeout=0.05)
        assert not done
        assert server.asked("/generate") == []
        await engine.abort("r0")
        assert (await tasks[0]).meta_info["finish_reason"]["type"] == "abort"
        await engine.resume()
        assert (await asyncio.wait_for(tasks[1], 30)).token_ids == [0]  # told at once, and not when it looks again


async def test_an_abort_names_what_was_renamed() -> None:
    async def once_then_hang(server: Server, request: Any, body: Any, before: int) -> Any:
        return (503, {}) if before == 0 else await hang(server, request, body, before)

    async with servers(generating(once_then_hang)) as (server,), engine_at(server) as engine:
        task = asyncio.create_task(engine.generate([3], {}, rid="r"))
        await until(lambda: len(server.asked("/generate")) == 2)
        await engine.abort("r")
        assert server.asked("/abort_request") == [{"rid": server.asked("/generate")[1]["rid"]}]
        assert server.asked("/generate")[1]["rid"] != "r~"
        task.cancel()


async def test_an_abort_that_overtakes_its_request_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ABORT_AGAIN_S", 0.05)
    second = asyncio.Event()

    async def react(server: Server, request: Any, body: Any, before: int) -> Any:
        if request.path == "/generate":
            await second.wait()
            return answer(7, reason="abort")
        if request.path == "/abort_request" and before == 1:
            second.set()
        return {}

    async with servers(react) as (server,), engine_at(server) as engine:
        task = asyncio.create_task(engine.generate([3], {}, rid="r"))
        await until(lambda: server.asked("/generate"))
        await engine.abort()
        assert (await asyncio.wait_for(task, 30)).token_ids == [7]
        told = server.asked("/abort_request")[:2]  # a third may follow before the answer is here
        assert told == [{"abort_all": True}, {"rid": server.asked("/generate")[0]["rid"]}]


def sglang(software: str) -> Reaction:
    """Answers with the version 5, and says which software it is."""

    async def react(server: Server, request: Any, body: Any, before: int) -> Any:
        if request.path == "/server_info":
            return {"version": software}
        return answer(1, version="5") if request.path == "/generate" else {"weight_version": "5"}

    return react


async def test_prefixes_are_shared_within_a_version_only() -> None:
    """By both ways of asking, and never with another run's of the same number; not a name before there is a version."""
    async with servers(sglang("0.5.20")) as (server,), engine_at(server) as engine, engine_at(server) as other:
        await engine.generate([3], {})
        for version in (4, 4, 5):
            engine.pool.version_wanted, engine.pool.version_coming = version, 5
            await engine.generate([3], {})
        other.pool.version_wanted = 5
        await other.generate([3], {})
        keys = [body.get("extra_key") for body in server.asked("/generate")]
        assert keys[0] is None
        assert keys[1] == keys[2]
        assert all(keys[1:])
        assert len(set(keys)) == 4
        server.react = one_event
        _ = [piece async for piece in engine.stream([3], {})]
        assert server.asked("/generate")[-1]["extra_key"] == keys[3]
    async with servers(sglang("slime 1.2.3")) as (server,), engine_at(server) as engine:
        engine.pool.version_wanted = 5
        await engine.generate([3], {})
        assert "extra_key" not in server.asked("/generate")[-1], "it refuses fields that it does not know"


async def one_event(server: Server, request: Any, body: Any, before: int) -> Any:
    """A stream of one event."""
    return await sse(request, answer(1, version="5"))


# -- streams -----------------------------------------------------------------------------------------------


def piece(*ids: int, total: int | None = None, reason: str | None = None, **meta: Any) -> dict[str, Any]:
    finish = None if reason is None else {"type": reason}
    return answer(*ids, completion_tokens=total or len(ids), finish_reason=finish, **meta)


def streaming(*events: Any, end: bool = True) -> Reaction:
    async def react(server: Server, request: Any, body: Any, before: int) -> Any:
        assert body["stream"] is True
        return await sse(request, *events, end=end)

    return generating(react)


WHOLE = (piece(1), piece(1, 2), piece(1, 2, 3, reason="length"))


async def collect(engine: Any, **keywords: Any) -> list[GenerationOutput]:
    return [output async for output in engine.stream([3], {}, **keywords)]


@pytest.mark.parametrize(
    "fault", [die, streaming(end=False), streaming(), streaming(b"nonsense"), first(*[(503, {})] * 9)]
)
async def test_a_stream_that_breaks_before_its_first_token_goes_elsewhere(fault: Reaction) -> None:
    async with servers(generating(fault), streaming(*WHOLE)) as made, engine_at(*made) as engine:
        for _ in range(3):
            assert (await collect(engine))[-1].token_ids == [1, 2, 3]
        assert engine.take_metrics()["engine/retried_requests"] >= 1
        assert {w.busy for w in engine.pool.workers} == {0}


@pytest.mark.parametrize("end", [True, False])
async def test_a_stream_that_breaks_later_ends_like_an_aborted_one(end: bool) -> None:
    async with servers(streaming(*WHOLE[:2], end=end), well) as made, engine_at(*made) as engine:
        outputs = await collect(engine, session_id="s")
        assert [o.token_ids for o in outputs] == [[1], [1, 2], [1, 2]]
        assert outputs[-1].meta_info["finish_reason"]["type"] == "abort"
        assert "stream" in outputs[-1].meta_info["finish_reason"]["message"]
        assert engine.take_metrics()["engine/broken_streams"] == 1
        assert made[1].asked("/generate") == []


async def test_errors_in_a_stream_and_leaving_it() -> None:
    async with servers(streaming({"error": {"message": "too long"}})) as (server,), engine_at(server) as engine:
        with pytest.raises(EngineError, match="too long"):
            await collect(engine)
        assert len(server.asked("/generate")) == 1
    async with servers(streaming(*WHOLE)) as (server,), engine_at(server) as engine:
        stream = engine.stream([3], {}, rid="left")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert server.asked("/abort_request") == [{"rid": "left~"}]
        assert engine.pool.workers[0].busy == 0


async def test_a_stream_of_other_weights() -> None:
    wrong, right = piece(9, reason="length", weight_version="4"), piece(1, reason="length", weight_version="5")
    async with servers(streaming(wrong), streaming(right)) as made, engine_at(*made) as engine:
        engine.pool.version_wanted = 5
        for _ in range(2):
            assert [o.token_ids for o in await collect(engine)] == [[1]]
        assert [w.state.value for w in engine.pool.workers] == ["quarantined", "ready"]


# -- router ----------------------------------------------------------------------------------------------


class Setup:
    """A client with a router in front of its servers."""

    def __init__(self, front: Server, *made: Server, role: str = "regular") -> None:
        self.http = Http(timeout=5.0)
        self.pool = WorkerPool([Worker(s.url, role=role, state=WorkerState.READY) for s in made])
        self.router = Router(self.http, front.url)
        self.failures = 0
        self.checked = 0

    async def __aenter__(self) -> Client:
        await self.http.open()
        self.client = Client(
            self.http, self.pool, self.router, Args(), check_versions=self._check, router_failed=self._failed
        )  # fmt: skip
        self.client.setup = self  # type: ignore[attr-defined]
        return self.client

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        await self.http.close()

    async def _check(self) -> None:
        self.checked += 1

    def _failed(self) -> None:
        self.failures += 1


async def test_the_router_is_asked_unless_it_drops_something() -> None:
    async with servers(well, well) as (front, worker), Setup(front, worker) as client:
        params = {"temperature": 0.5, "sampling_seed": 3, "spaces_between_special_tokens": False, "stop": None}
        assert (await client.generate([3], params, session_id="s")).token_ids == [0]
        assert front.calls[-1][2]["x-smg-routing-key"] == "s"
        assert (await client.generate([3], {"custom_params": {"a": 1}})).token_ids == [1]
        client._args.use_rollout_routing_replay = True
        assert (await client.generate([3], {})).token_ids == [1]
        assert worker.asked("/generate")[-1]["return_routed_experts"] is True
        assert client.counts["bypassed_router"] == 2


async def test_a_router_that_is_down_or_failing_is_gone_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async with servers(first((503, {}), (500, {})), well) as (front, worker):
        setup = Setup(front, worker)
        async with setup as client:
            for _ in range(2):
                assert (await client.generate([3], {})).token_ids == [1]
            assert (await client.generate([3], {})).token_ids == [0]
            assert setup.failures == 0
            await front.stop()
            for _ in range(3):
                assert (await client.generate([3], {})).token_ids == [1]
            assert setup.failures == 1  # the others did not even ask
            monkeypatch.setattr(client_module, "ROUTER_REST_S", 0.0)
            assert client.counts["bypassed_router"] == 5


async def test_a_wrong_version_through_the_router() -> None:
    async with servers(version("4"), version("5")) as (front, worker):
        setup = Setup(front, worker)
        async with setup as client:
            setup.pool.version_wanted = 5
            assert (await client.generate([3], {})).token_ids == [1]
            assert (setup.checked, client.counts["wrong_version_answers"], setup.failures) == (1, 1, 0)
            assert setup.pool.workers[0].state is WorkerState.READY


async def test_prefill_and_decode_servers_are_never_asked_directly() -> None:
    async with servers(first((503, {})), well) as (front, worker), Setup(front, worker, role="prefill") as client:
        assert (await client.generate([3], {})).token_ids == [0]
        assert len(front.asked("/generate")) == 2
        with pytest.raises(EngineError, match=r"custom_params.*cannot be asked directly"):
            await client.generate([3], {"custom_params": {"a": 1}})
        assert worker.asked("/generate") == []


async def test_a_server_that_is_not_there_is_named() -> None:
    engine = HttpEngine(Args(rollout_external_engine_addrs=["127.0.0.1:9"], rollout_timeout=5.0))
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        await engine.start()


# -- engine ----------------------------------------------------------------------------------------------


async def test_the_workers_of_a_router_are_found_and_requests_go_through_it() -> None:
    async with servers(well, well) as (worker, front):

        async def router(server: Server, request: Any, body: Any, before: int) -> Any:
            workers = {"workers": [{"url": worker.url, "id": "u", "is_healthy": True}]}
            return workers if request.path == "/workers" else await well(server, request, body, before)

        front.react = router
        host, port = front.address.split(":")
        engine = HttpEngine(Args(sglang_router_ip=host, sglang_router_port=int(port)))
        await engine.start()
        assert await engine.address() == (host, int(port))
        assert (await engine.generate([3], {})).token_ids == [1]
        await engine.abort()
        await engine.stop()
        assert [path for path, _, _ in front.calls] == ["/workers", "/generate"]
        assert worker.asked("/generate") == []
        assert worker.asked("/abort_request") == [{"abort_all": True}]


async def test_an_address_without_a_list_of_workers_is_a_server() -> None:
    async def lonely(server: Server, request: Any, body: Any, before: int) -> Any:
        return (404, {}) if "workers" in request.path else await well(server, request, body, before)

    async with servers(lonely) as (server,):
        host, port = server.address.split(":")
        engine = HttpEngine(Args(sglang_router_ip=host, sglang_router_port=int(port)))
        await engine.start()
        await engine.start()  # safe twice
        assert engine.router is None
        assert (await engine.generate([3], {})).token_ids == [0]
        await engine.stop()
        await engine.stop()
        with pytest.raises(EngineError, match="start"):
            await engine.generate([3], {})


async def test_settings_that_make_no_sense() -> None:
    async def nobody(*_: Any) -> Any:
        return {"workers": []}

    with pytest.raises(ConfigError, match="--rollout-external-engine-addrs"):
        await HttpEngine(Args()).start()
    with pytest.raises(ConfigError, match="HOST:PORT"):
        await HttpEngine(Args(rollout_external_engine_addrs=["localhost"])).start()
    with pytest.raises(EngineError, match="start"):
        await HttpEngine(Args(rollout_external_engine_addrs=["a:1"])).generate([1], {})
    async with servers(nobody) as (front,):
        host, port = front.address.split(":")
        with pytest.raises(EngineError, match="has no workers"):
            await HttpEngine(Args(sglang_router_ip=host, sglang_router_port=int(port))).start()


# -- control ---------------------------------------------------------------------------------------------


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


async def test_a_server_that_takes_no_abort_is_brought_back_or_told_of() -> None:
    async with servers(at("/abort_request", *[die] * 99), well) as made, engine_at(*made) as engine:
        with pytest.raises(EngineError, match="abort_request"):
            await engine.abort()
        assert len(engine.pool.ready) == 2
        await_all(engine.pool)
        await engine.abort()
        assert [w.state.value for w in engine.pool.workers] == ["quarantined", "ready"]


async def test_servers_of_another_version_are_taken_out() -> None:
    async with servers(well, at("/model_info", {"weight_version": "0"})) as made, engine_at(*made) as engine:
        await engine.check_versions()
        assert len(engine.pool.ready) == 2  # none is wanted
        engine.pool.version_wanted = 1
        await engine.check_versions()
        assert [w.reason for w in engine.pool.workers] == ["", "reports weight version '0', wanted is 1"]
