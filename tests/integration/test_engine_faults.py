"""Faults of servers and routers while requests and weight updates run, with small real servers that start in no time.

The twin of `tests/backends/test_fault_matrix.py`, which does the same with SGLang. In each: every request is answered,
none with other weights than those wanted while it ran, and what happened is in the record of events.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_engine_http.api.answers import versions_in
from slime_engine_http.api.client import Client
from slime_engine_http.api.control import Control
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.incidents import Incidents
from slime_engine_http.servers import Supervised
from slime_engine_http.supervisor import Supervisor
from slime_engine_http.weights.update import WeightUpdates
from slime_runs.events import EventLog
from slime_runs.files import read_lines

from slime_core.config import Args
from slime_core.sample import GenerationOutput
from tests.engine_processes import EmbeddedServer, SmallRouter
from tests.tiny_models import make_model, one_thread

__all__ = ["make_model", "one_thread"]

PROMPTS = ([5, 6, 7], [11, 12, 13, 14, 15], [40, 41])
TOKENS = 60
DEADLINE_S = 240.0
"""Reached only where something hangs, however busy the machine is."""


@dataclass
class Weights:
    """Three checkpoints, of which version N serves number N % 3, and what each answers."""

    directories: list[Path]
    answers: list[list[tuple[list[int], list[float]]]]


@pytest.fixture(scope="module")
def weights(make_model: Callable[..., tuple[Path, Any]]) -> Weights:
    made = [make_model("qwen3", seed=seed) for seed in range(3)]
    return Weights([directory for directory, _ in made], [[greedy(model, p) for p in PROMPTS] for _, model in made])


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    ids, log_probs = list(prompt), []
    for _ in range(TOKENS):
        scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(scores.argmax()))
        log_probs.append(float(scores.max()))
    return ids[len(prompt) :], log_probs


class Rig:
    """Two servers behind a router, client, weight updates and supervisor, put together as the engine does it."""

    def __init__(self, weights: Weights, directory: Path, *, timeout: float = 1.5) -> None:
        self.weights = weights
        self.directory = directory
        self.servers = [EmbeddedServer(f"server {i}", weights.directories[0]) for i in range(2)]
        self.router = SmallRouter()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.asked = 0
        self.pushing: int | None = None
        for process in (*self.servers, self.router):
            process.start()
        for process in (*self.servers, self.router):
            process.wait()
        self.workers = [Worker(s.url, owned=True, state=WorkerState.READY) for s in self.servers]
        self.pool = WorkerPool(self.workers)
        self.args = Args(
            use_fault_tolerance=True, rollout_health_check_interval=0.2, rollout_health_check_timeout=timeout,
            rollout_health_check_first_wait=0.0, rollout_max_engine_restarts=100, update_weight_timeout=30.0,
        )  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rig]:
        self.http = Http(timeout=DEADLINE_S)
        await self.http.open()
        router = Router(self.http, self.router.url)
        for worker in self.workers:
            await router.add_worker(worker)
        self.updates = WeightUpdates(self.http, self.pool, self.args)
        model = Supervised(
            "default", self.pool, dict(zip(self.workers, self.servers)),
            router_url=self.router.url, router_process=self.router, catch_up=self._catch_up,
        )  # fmt: skip
        self.supervisor = Supervisor(self.args, [model], Incidents(EventLog(self.directory)))
        self.client = Client(
            self.http,
            self.pool,
            router,
            self.args,
            check_versions=Control(self.http, self.pool).check_versions,
            router_failed=lambda: self.supervisor.router_failed(),
        )
        self.supervisor.start()
        try:
            yield self
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.to_thread(self.supervisor.stop)
            self.client.close()
            self.updates.close()
            await self.http.close()

    async def _catch_up(self, worker: Worker) -> None:
        assert self.updates.last is not None
        assert self.updates.last.version == self.pool.version_wanted
        await self.updates.catch_up(worker)

    async def update(self, version: int) -> None:
        self.pushing = version
        await self.updates.from_directory(self.weights.directories[version % 3], version)
        self.pushing = None

    async def ask(self, number: int) -> GenerationOutput:
        """One request, answered with the tokens of a version that was wanted while it ran."""
        prompt = number % len(PROMPTS)
        oldest = self.pool.version_wanted or 0
        params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        async with asyncio.timeout(DEADLINE_S):
            output = await self.client.generate(
                PROMPTS[prompt], params, session_id=f"s{number}" if number % 4 else None
            )
        newest = max(self.pool.version_wanted or 0, self.pushing or 0)
        versions = {int(v) for v in versions_in(output.meta_info)}
        assert versions, output.meta_info
        assert all(oldest <= v <= newest for v in versions), (versions, oldest, newest)
        assert len(output.token_ids) == TOKENS
        if len(versions) == 1:
            ids, log_probs = self.weights.answers[versions.pop() % 3][prompt]
            assert output.token_ids == ids
            assert output.log_probs == pytest.approx(log_probs, abs=1e-4)
        return output

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task

    async def load(self, count: int, *, over: float = 1.0) -> None:
        """`count` requests that begin within `over` seconds; each is checked."""

        async def later(number: int) -> None:
            await asyncio.sleep(over * number / count)
            await self.ask(number)

        first, self.asked = self.asked, self.asked + count
        await asyncio.gather(*(later(first + number) for number in range(count)))

    async def all_ready(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.pool.ready) < len(self.workers) or not self.router.alive:
                await asyncio.sleep(0.02)

    def events(self) -> list[str]:
        return [line["event"] for line in read_lines(self.directory / "events.jsonl")]

    def close(self) -> None:
        for process in (*self.servers, self.router):
            process.kill()


@pytest.fixture
def rig(weights: Weights, tmp_path: Path) -> Any:
    made = Rig(weights, tmp_path)
    yield made
    made.close()


def _faults(rig: Rig, chance: random.Random) -> Callable[[], object]:
    server = chance.choice(rig.servers)

    def slow() -> None:
        server.freeze()
        threading.Timer(chance.uniform(0.1, 0.8), lambda: server.alive and server.send(signal.SIGCONT)).start()

    def lie() -> None:
        server.post("/update_weight_version", {"new_version": chance.choice(["0", "999", "default"])})

    return chance.choice([
        lambda: server.send(signal.SIGKILL), server.freeze, slow, lie,
        lambda: rig.router.send(signal.SIGKILL), rig.router.freeze,
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_random_faults(rig: Rig, seed: int) -> None:
    """Anything at any moment; a schedule that fails is found again by its seed."""
    chance = random.Random(seed)
    # Where a server that is only slow counts as hung, as on a busy machine, a request meets more faults than four.
    rig.args.rollout_health_check_timeout = 10.0
    async with rig.running():
        await rig.update(1)
        load = rig.background(rig.load(150, over=3.0))
        for version in (2, 3, 4):
            await rig.all_ready()  # the client gives a request to four servers at most, lest it end them all
            update = None
            for _ in range(chance.choice([1, 2])):
                await asyncio.sleep(chance.uniform(0.0, 0.5))
                fault = _faults(rig, chance)
                try:
                    await asyncio.to_thread(fault)
                except (OSError, AssertionError, ValueError):
                    continue  # its victim was down already
                if update is None and chance.random() < 0.7:
                    update = rig.background(rig.update(version))
            async with asyncio.timeout(DEADLINE_S):
                await (update or rig.background(rig.update(version)))
        began = time.monotonic()
        await load
        await rig.all_ready()
        await rig.load(20, over=0.1)
        assert time.monotonic() - began < DEADLINE_S
        assert rig.pool.version_wanted == 4
