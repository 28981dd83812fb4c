"""The supervisor over real embedded servers in processes of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from slime_engine_http import servers, worker_watch
from slime_engine_http.api.transport import Answer, Http
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.incidents import Incidents
from slime_engine_http.servers import Supervised
from slime_engine_http.supervisor import Supervisor
from slime_engine_http.worker_watch import OtherWeightsError, WorkerWatch
from slime_runs.events import EventLog
from slime_runs.files import read_lines
from slime_testing_contracts.tiny import tiny_model

from slime_core.config import Args
from slime_core.errors import EngineError
from tests.engine_processes import EmbeddedServer
from tests.until import wait_until

READY, OUT = WorkerState.READY, WorkerState.QUARANTINED


class Fleet:
    """Servers, their pool, and a supervisor over them."""

    def __init__(
        self, directory: Path, *, count: int = 2, owned: bool = True, started: bool = True, **settings: Any
    ) -> None:
        self.directory = directory
        self.servers = [EmbeddedServer(f"server {i}", tiny_model()) for i in range(count)]
        for server in self.servers if started else []:
            server.start()
        for server in self.servers if started else []:
            server.wait()
        self.workers = [Worker(s.url, owned=owned, state=READY) for s in self.servers]
        self.pool = WorkerPool(self.workers)
        known = dict(zip(self.workers, self.servers)) if owned else {}
        self.model = Supervised("default", self.pool, known, catch_up=self._catch_up)
        defaults = {
            "use_fault_tolerance": True, "rollout_health_check_interval": 0.2, "rollout_health_check_timeout": 10.0,
            "rollout_health_check_first_wait": 0.0, "rollout_max_engine_restarts": 3,
        }  # fmt: skip
        self.supervisor = Supervisor(Args(**defaults | settings), [self.model], Incidents(EventLog(directory)))

    async def _catch_up(self, worker: Worker) -> None:
        """What a weight transport does, with the smallest update there is."""
        http = Http(timeout=20)
        await http.open()
        try:
            await http.send(
                "POST", worker.url, "/update_weight_version", {"new_version": str(self.pool.version_wanted)}
            )
        finally:
            await http.close()

    def update(self, version: int) -> None:
        """Bring every ready server to the version."""
        with self.pool.update_lock:
            for worker, server in zip(self.workers, self.servers):
                if worker.state is READY:
                    server.post("/update_weight_version", {"new_version": str(version)})
            self.pool.version_wanted = version

    def events(self, number: int = 0) -> list[str]:
        """Return the events of one server in `events.jsonl`."""
        url = self.servers[number].url
        return [line["event"] for line in read_lines(self.directory / "events.jsonl") if line["url"] == url]

    def close(self) -> None:
        self.supervisor.stop()
        for process in self.servers:
            process.kill()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(**settings: Any) -> Fleet:
        made.append(Fleet(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.slow
def test_nothing_is_judged_while_weights_are_pushed_or_generation_is_paused(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = fleet(count=1, rollout_health_check_timeout=20.0)
    look, findings = WorkerWatch.look, list[str]()

    async def noted(watch: WorkerWatch) -> str:
        findings.append(await look(watch))
        return findings[-1]

    def looked(times: int) -> None:
        enough = len(findings) + times
        wait_until(lambda: len(findings) >= enough, f"{times} looks")

    monkeypatch.setattr(WorkerWatch, "look", noted)
    it.update(1)
    it.pool.paused = True
    it.servers[0].post("/pause_generation", {"mode": "in_place"})  # /health_generate now waits for 20 seconds
    it.supervisor.start()
    looked(3)
    with it.pool.update_lock:
        it.servers[0].post("/update_weight_version", {"new_version": "2"})
        looked(3)
        it.pool.version_wanted = 2
    looked(2)
    assert set(findings) == {""}
    assert it.events() == []
    it.supervisor.of_workers[it.workers[0]].timeout = 1.5
    it.pool.paused = False
    wait_until(lambda: it.servers[0].starts >= 2 and it.workers[0].state is READY, "the paused server to be found hung")


@pytest.mark.slow
def test_restarts_are_bounded_and_the_reason_is_kept(fleet: Callable[..., Fleet]) -> None:
    it = fleet(count=1, rollout_max_engine_restarts=2)
    it.supervisor.start()
    assert it.pool.recovering
    it.servers[0].refuse = "no memory left"
    it.servers[0].send(signal.SIGKILL)
    wait_until(lambda: not it.pool.recovering, "the supervisor to give up")
    with pytest.raises(EngineError, match=r"no engine is ready: .*out for good after 2 restarts .*no memory left"):
        it.pool.acquire()
    assert it.events() == ["quarantined", "restart_failed", "restart_failed", "lost"]


@pytest.mark.slow
def test_an_external_server_is_never_restarted_and_comes_back_with_the_wanted_version(
    fleet: Callable[..., Fleet],
) -> None:
    it = fleet(owned=False, rollout_health_check_timeout=1.5)
    it.update(3)
    it.supervisor.start()
    it.servers[0].kill()
    wait_until(lambda: it.workers[0].state is OUT, "the dead server to be found")
    time.sleep(1.0)
    assert it.servers[0].starts == 1
    assert it.events() == ["quarantined"]
    it.servers[0].start()  # by hand, on its port, with the weights of the checkpoint
    it.servers[0].wait()
    wait_until(lambda: it.workers[0].state is READY, "the server to be readmitted")
    assert it.servers[0].get("/model_info")["weight_version"] == "3"
    wait_until(lambda: it.events() == ["quarantined", "readmitted"], "the event")


@pytest.mark.parametrize("lack", ["server", pytest.param("weights", marks=pytest.mark.slow)])
def test_an_external_server_that_does_not_come_back_is_lost_and_the_error_says_how_to_go_on(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    monkeypatch.setattr(servers, "COMEBACK_S", 1.0 if lack == "server" else 60.0)
    there = lack == "weights"
    it = fleet(count=1, owned=False, use_fault_tolerance=False, rollout_health_check_timeout=0.5, started=there)
    it.pool.version_wanted = 3
    it.supervisor.start()
    if there:
        it.servers[0].post("/update_weight_version", {"new_version": "0"})

        async def nothing_kept(worker: Worker) -> None:
            raise servers.WeightsNotKept("has come back without the weights of version 3")

        it.model.catch_up = nothing_kept
    it.pool.set_state(it.workers[0], OUT, "Cannot connect")
    wait_until(lambda: not it.pool.recovering, "the supervisor to give up")
    what = r"is gone: it has not come back within 1 s \(Cannot connect\)" if lack == "server" else "without the weights"
    with pytest.raises(EngineError, match=rf"no engine is ready: {it.workers[0].url} .*{what}.*Start it again"):
        it.pool.acquire()
    wait_until(lambda: it.events() == ["quarantined", "lost"], "the event, which is told after the pool")


@pytest.mark.slow
def test_readmission_waits_for_an_update_that_is_under_way(fleet: Callable[..., Fleet]) -> None:
    it = fleet()
    it.update(1)
    it.supervisor.start()
    with it.pool.update_lock:
        it.servers[0].send(signal.SIGKILL)
        wait_until(lambda: it.servers[0].starts == 2, "the restart")
        time.sleep(1.0)
        assert it.workers[0].state is OUT
        it.servers[1].post("/update_weight_version", {"new_version": "2"})
        it.pool.version_wanted = 2
    wait_until(lambda: it.workers[0].state is READY, "the worker to be back")
    assert it.servers[0].get("/model_info")["weight_version"] == "2"


# -- servers that answer no requests for tokens ------------------------------------------------------------


def companion(it: Fleet) -> EmbeddedServer:
    made = EmbeddedServer("encoder", tiny_model())
    made.start()
    made.wait()
    it.servers.append(made)  # so that it ends with the others
    it.model.companions = [made]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_companion_that_died_or_hangs_is_restarted_and_nobody_quarantined(
    fleet: Callable[..., Fleet], how: int
) -> None:
    it = fleet(count=1, rollout_health_check_timeout=60.0 if how == signal.SIGKILL else 8.0)
    encoder = companion(it)
    it.supervisor.start()
    encoder.send(how)
    wait_until(lambda: it.events(1)[:2] == ["companion_failed", "restarted"], "the companion to be back")
    assert encoder.starts == 2
    assert it.events(0) == []
    assert it.supervisor.take_metrics()["engine/restarts"] == 1


# -- one look at a server, against servers that answer as they are told ----------------------------------


class Server:
    """Answers as its attributes say."""

    def __init__(self) -> None:
        self.info: Any = {"model_path": "/m", "weight_version": "3"}
        self.refusals = 0
        """So many health requests are refused before the next one passes."""
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path.endswith("model_info"):
            return web.json_response(self.info)
        self.refusals -= 1
        return web.Response(status=503 if self.refusals >= 0 else 200)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_get("/{path}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.worker = Worker(f"http://127.0.0.1:{runner.addresses[0][1]}", state=WorkerState.READY)  # type: ignore[attr-defined]
    made.pool = WorkerPool([made.worker])  # type: ignore[attr-defined]
    yield made
    await runner.cleanup()


Look = Callable[..., WorkerWatch]


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Look]:
    """(worker, its pool, timeout, process) -> the watch on it."""
    http = Http(timeout=30)
    await http.open()

    def make(worker: Worker, pool: WorkerPool, timeout: float = 60, process: Any = None) -> WorkerWatch:
        args = Args(use_fault_tolerance=True, rollout_health_check_timeout=timeout)
        model = Supervised("default", pool, {} if process is None else {worker: process})
        return WorkerWatch(model, worker, None, http, args, Incidents(EventLog(tmp_path)))

    yield make
    await http.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a look every answer takes 250 s, so that of 600 s there are 100 left for its third and last question."""
    send, answers = Http.send, 0

    async def counted(*given: Any, **options: Any) -> Answer:
        nonlocal answers
        try:
            return await send(*given, **options)
        finally:
            answers += 1

    monkeypatch.setattr(Http, "send", counted)
    monkeypatch.setattr(worker_watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 250.0 * answers))


@pytest.mark.usefixtures("slow")
async def test_refusals_are_asked_again_until_the_time_is_up(server: Any, watch: Look) -> None:
    server.refusals = 100
    found = await watch(server.worker, server.pool, 600).look()
    assert "status 503" in found
    assert "(--rollout-health-check-timeout)" in found
    assert server.asked == ["/model_info", *["/health_generate"] * 3]


async def test_a_process_that_ends_ends_the_look(server: Any, watch: Look) -> None:
    server.refusals = 1000
    began = time.monotonic()

    class Process:
        name = "server 0"
        alive = property(lambda self: time.monotonic() < began + 0.5)

    assert await watch(server.worker, server.pool, 120, Process()).look() == "its process ended"
    assert time.monotonic() - began < 60


async def test_other_weights(server: Any, watch: Look) -> None:
    beat = watch(server.worker, server.pool)
    server.pool.version_wanted = 4
    assert await beat.look() == "serves weight version '3', wanted is 4"
    server.info["weight_version"] = "default"
    assert await beat.look() == "serves weight version 'default', wanted is 4"
    server.pool.update_lock.acquire()
    assert await beat.look() == ""
    with pytest.raises(OtherWeightsError):
        await beat.ask_weights(locked=True)


async def test_a_model_path_that_moves_without_an_update(server: Any, watch: Look) -> None:
    beat = watch(server.worker, server.pool)
    assert await beat.look() == ""
    server.info["model_path"] = "/other"
    assert await beat.look() == "serves /other, it was /m"
    server.pool.version_wanted = 3  # an update from disk moves it, and rightly
    assert await beat.look() == ""
    server.info["model_path"] = "/m"
    assert await beat.look() == "serves /m, it was /other"
    server.worker.loaded = None
    assert await beat.look() == ""
