"""The supervisor over real embedded servers in processes of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_engine_http import servers
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.incidents import Incidents
from slime_engine_http.servers import Supervised
from slime_engine_http.supervisor import Supervisor
from slime_engine_http.worker_watch import WorkerWatch
from slime_runs.events import EventLog
from slime_runs.files import read_lines
from slime_testing_contracts.tiny import tiny_model

from slime_core.config import Args
from slime_core.errors import EngineError
from tests.engine_processes import EmbeddedServer, SmallRouter
from tests.until import wait_until

READY, OUT = WorkerState.READY, WorkerState.QUARANTINED


class Fleet:
    """Servers, their pool, and a supervisor over them."""

    def __init__(
        self, directory: Path, *, count: int = 2, owned: bool = True, frozen: bool = False, routed: bool = False,
        started: bool = True, **settings: Any,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.router = SmallRouter() if routed else None
        if self.router is not None:
            self.router.start()
            self.router.wait()
        self.servers = [EmbeddedServer(f"server {i}", tiny_model()) for i in range(count)]
        for server in self.servers if started else []:
            server.start()
        for server in self.servers if started else []:
            server.wait()
        self.workers = [Worker(s.url, owned=owned, state=READY) for s in self.servers]
        self.pool = WorkerPool(self.workers)
        self.caught_up: list[str] = []
        known = dict(zip(self.workers, self.servers)) if owned else {}
        self.model = Supervised("default", self.pool, known, catch_up=None if frozen else self._catch_up)
        if self.router is not None:
            self.model.router_process, self.model.router_url = self.router, self.router.url
            for worker in self.workers:
                self.router.post("/workers", {"url": worker.url})
        defaults = {
            "use_fault_tolerance": True, "rollout_health_check_interval": 0.2, "rollout_health_check_timeout": 10.0,
            "rollout_health_check_first_wait": 0.0, "rollout_max_engine_restarts": 3,
        }  # fmt: skip
        self.supervisor = Supervisor(Args(**defaults | settings), [self.model], Incidents(EventLog(directory)))

    async def _catch_up(self, worker: Worker) -> None:
        """What a weight transport does, with the smallest update there is."""
        self.caught_up.append(worker.url)
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

    def records(self, number: int | None = 0) -> list[dict[str, Any]]:
        """What `events.jsonl` says of one server, or of the router."""
        process = self.router if number is None else self.servers[number]
        assert process is not None
        return [line for line in read_lines(self.directory / "events.jsonl") if line["url"] == process.url]

    def events(self, number: int | None = 0) -> list[str]:
        return [line["event"] for line in self.records(number)]

    def close(self) -> None:
        self.supervisor.stop()
        for process in [*self.servers, *([self.router] if self.router is not None else [])]:
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
def test_a_killed_server_is_restarted_and_brought_to_the_current_version(fleet: Callable[..., Fleet]) -> None:
    it = fleet()
    it.update(4)
    it.supervisor.start()
    it.servers[0].send(signal.SIGKILL)
    wait_until(lambda: it.servers[0].starts == 2 and it.workers[0].state is READY, "the worker to be back")
    assert it.servers[0].get("/model_info")["weight_version"] == "4"
    assert it.workers[0].weight_version == 4
    assert it.servers[1].starts == 1
    wait_until(lambda: "restarted" in it.events(), "the event")
    assert it.events() == ["quarantined", "restarted"]
    (first, second) = it.records()
    assert "signal 9" in first["reason"]
    assert first["engine"] == "server 0"
    metrics = it.supervisor.take_metrics()
    assert metrics.pop("engine/recovery_time") == pytest.approx(second["seconds"], abs=0.001)
    assert metrics == {"engine/restarts": 1, "engine/router_restarts": 0, "engine/quarantined": 1}
    assert set(it.supervisor.take_metrics().values()) == {0.0}


@pytest.mark.slow
def test_a_frozen_server_is_found_killed_and_replaced(fleet: Callable[..., Fleet]) -> None:
    it = fleet(rollout_health_check_timeout=1.5)
    it.supervisor.start()
    frozen = it.servers[0].pid
    it.servers[0].freeze()
    wait_until(lambda: it.servers[0].starts >= 2 and it.workers[0].state is READY, "the worker to be back")
    assert it.servers[0].pid != frozen
    assert "--rollout-health-check-timeout" in it.records()[0]["reason"]


@pytest.mark.slow
def test_a_server_with_other_weights_is_replaced(fleet: Callable[..., Fleet]) -> None:
    it = fleet()
    it.update(7)
    it.supervisor.start()
    it.servers[1].post("/update_weight_version", {"new_version": "6"})
    wait_until(lambda: it.servers[1].starts == 2 and it.workers[1].state is READY, "the worker to be back")
    assert "serves weight version '6', wanted is 7" in it.records(1)[0]["reason"]
    assert it.servers[1].get("/model_info")["weight_version"] == "7"


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


@pytest.mark.slow
def test_a_dead_router_comes_back_at_its_address_and_knows_every_ready_server(fleet: Callable[..., Fleet]) -> None:
    it = fleet(routed=True)
    assert it.router is not None
    it.supervisor.start()
    url, everybody = it.router.url, {worker.url for worker in it.workers}
    it.router.send(signal.SIGKILL)
    it.supervisor.router_failed()
    wait_until(lambda: "router_restarted" in it.events(None), "the router to be back")
    assert (it.router.starts, it.router.alive) == (2, True)
    assert it.supervisor.take_metrics()["engine/router_restarts"] == 1
    assert it.router.url == url
    assert it.router.workers() == everybody
    assert [line["event"] for line in read_lines(it.directory / "events.jsonl")] == [
        "router_failed",
        "router_restarted",
    ]
    assert it.pool.ready == it.workers


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
