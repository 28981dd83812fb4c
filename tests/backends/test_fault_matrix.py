"""The fault matrix with real SGLang: two servers behind the real router, launched, updated and watched by the engine.

One engine for the whole module, as a start costs 15 to 60 seconds; every case leaves it whole, and each restart in it
is one more start, so no two cases need one for the same thing. `tests/integration/test_engine_faults.py` is the fast
twin, with random schedules.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from slime_engine_http.service import Service
from slime_engine_http.weights.protocol import ServerFacts
from slime_engine_sglang.engine import SglangEngine
from slime_runs.files import read_lines

from slime_core.errors import WeightSyncError
from slime_core.sample import GenerationOutput
from tests.backends.whole_runs import command_line
from tests.engine_processes import EmbeddedServer

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1200)]

PROMPTS = ([5, 6, 7], [11, 12, 13, 14, 15], [40, 41])
TOKENS = 48
BACK_S = 600.0
"""For a server to be back; a start took two and a half minutes on two cores that thirty other processes wanted."""


@torch.inference_mode()
def check_greedy(models: dict[int, Any], prompt: list[int], output: GenerationOutput) -> None:
    """Each token is the best one to the weights of the version that it bears, and its log-prob is theirs."""
    versions = output.meta_info["token_weight_versions"]
    assert versions == sorted(versions)
    ids = torch.tensor([[*prompt, *output.token_ids]])
    scores = {v: models[v](ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for v in set(versions)}
    for place, (token, log_prob, version) in enumerate(zip(output.token_ids, output.log_probs, versions)):
        best = scores[version][place]
        assert float(best[token]) == pytest.approx(float(best.max()), abs=1e-4), (place, versions)
        assert float(best[token]) == pytest.approx(log_prob, abs=1e-3), (place, versions)


class Rig:
    """The engine, driven by an event loop that turns only while something is asked of it, as the rollout stage's."""

    def __init__(self, args: Any, models: list[tuple[Path, Any]]) -> None:
        self.models = models
        self.directory = Path(args.run_dir)
        self.engine = SglangEngine(args)
        self.loop = asyncio.Runner()
        self.version = 0
        self.pushing: int | None = None
        self.mixed = 0
        """Answers with tokens of two versions."""
        self.loop.run(self.engine.start())
        (self.model,) = self.engine.supervised
        assert self.model.router_process is not None
        self.router: Any = self.model.router_process

    def server(self, number: int) -> Any:
        return list(self.model.servers.values())[number]

    async def update(self, transport: str = "disk", pushing: Callable[[], object] = lambda: None) -> None:
        """The next version to all servers; `pushing` is called once they are paused and are about to take tensors."""
        self.version += 1
        self.pushing = self.version
        directory, model = self.models[self.version % 3]
        if transport == "disk":
            await self.engine.update_weights_from_disk(directory, self.version)
        else:

            def named() -> Iterator[tuple[str, torch.Tensor]]:
                pushing()
                for name, tensor in model.state_dict().items():
                    yield name, tensor.detach()

            await self.engine.update_weights_from_tensor(named(), self.version)
        self.pushing = None

    async def ask(self, number: int) -> None:
        """One request, answered as a whole with tokens of versions that were wanted while it ran."""
        pool, prompt = self.engine.pool, PROMPTS[number % len(PROMPTS)]
        oldest = pool.version_wanted or 0
        params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        output = await self.engine.generate(prompt, params, session_id=f"s{number}" if number % 4 else None)
        newest = max(pool.version_wanted or 0, self.pushing or 0)
        assert output.meta_info["finish_reason"] == {"type": "length", "length": TOKENS}
        assert len(output.token_ids) == TOKENS
        versions = output.meta_info["token_weight_versions"]
        assert len(versions) == TOKENS
        assert oldest <= min(versions) <= max(versions) <= newest
        assert output.meta_info["weight_version"] == str(versions[-1])
        self.mixed += len(set(versions)) > 1
        check_greedy({version: self.models[version % 3][1] for version in set(versions)}, prompt, output)

    async def load(self, count: int, *, over: float = 3.0) -> None:
        async def later(number: int) -> None:
            await asyncio.sleep(over * number / count)
            await self.ask(number)

        await asyncio.gather(*map(later, range(count)))

    async def whole(self) -> None:
        """Every server is ready at the version wanted, and known to the router."""
        async with asyncio.timeout(BACK_S):
            while len(self.engine.pool.ready) < 2 or not self.router.alive:
                await asyncio.sleep(0.1)
            assert self.engine.router is not None
            while set(await self.engine.router.list_workers() or ()) != {w.url for w in self.engine.pool.workers}:
                await asyncio.sleep(0.1)
            while {"quarantined", "router_failed"} & set({e["engine"]: e["event"] for e in self.events()}.values()):
                await asyncio.sleep(0.1)  # it is told of last
        answers = await self.engine.everywhere("GET", "/model_info")
        wanted = self.engine.pool.version_wanted
        assert {a["weight_version"] for a in answers.values()} == {"default" if wanted is None else str(wanted)}

    def events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.directory / "events.jsonl"))

    def close(self) -> None:
        self.loop.run(self.engine.stop())
        self.loop.close()


@pytest.fixture(scope="module")
def rig(
    make_text_model: Callable[..., tuple[Path, Any]],
    sglang_args: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    models = [make_text_model("qwen3", seed=seed) for seed in range(3)]
    args = sglang_args(
        models[0][0], tmp_path_factory.mktemp("faults"),
        rollout_num_gpus=2, use_fault_tolerance=True, rollout_health_check_interval=2,
        rollout_health_check_timeout=20, rollout_timeout=400, update_weight_timeout=120,
    )  # fmt: skip
    made = Rig(args, models)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def events(rig: Rig) -> Callable[[], list[str]]:
    """What was recorded during the test; it begins with everything in service, so every case shows the one before."""
    rig.loop.run(rig.whole())
    rig.loop.run(rig.update())
    rig.loop.run(rig.load(12, over=0.2))
    before = len(rig.events())
    rig.engine.take_metrics()
    return lambda: [line["event"] for line in rig.events()[before:]]


def processes(server: Service) -> list[int]:
    """SGLang's own processes, the one that answers HTTP first."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    assert server.pid is not None
    found, queue = [], [server.pid]
    while queue:
        below = [pid for pid, parent in parents.items() if parent == queue[0]]
        queue = queue[1:] + below
        found += [pid for pid in below if "guard.py" not in _command(pid)]
    return found


def _command(pid: int) -> str:
    try:
        return command_line(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return ""


def send(server: Service, number: int) -> None:
    for pid in processes(server):
        with contextlib.suppress(ProcessLookupError):  # the end of the first ends the others
            os.kill(pid, number)


def after(seconds: float, action: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def test_kill_9_in_the_middle_of_answers(rig: Rig, events: Callable[[], list[str]]) -> None:
    after(1.0, lambda: os.kill(processes(rig.server(0))[0], signal.SIGKILL))
    rig.loop.run(rig.load(60))
    rig.loop.run(rig.whole())
    assert events() == ["quarantined", "restarted"]
    metrics = rig.engine.take_metrics()
    assert metrics["engine/restarts"] == 1
    assert metrics["engine/recovery_time"] > 0


def test_an_update_in_the_middle_of_answers_cuts_none_short(rig: Rig, events: Callable[[], list[str]]) -> None:
    """SGLang until 0.5.20 has to end requests for it, so their rest is asked for again; later ones keep them."""

    async def both() -> None:
        load = asyncio.ensure_future(rig.load(60, over=1.0))
        for transport in ("tensor", "disk"):
            await asyncio.sleep(0.5)
            await rig.update(transport)
        await load

    mixed = rig.mixed
    rig.loop.run(both())
    assert rig.mixed > mixed
    keeps = "retract" in ServerFacts(rig.engine.pool.workers[0].software).pause_modes
    assert (rig.engine.take_metrics()["engine/continued_requests"] == 0) == keeps
    assert events() == []


def test_freeze_in_the_middle_of_answers(rig: Rig, events: Callable[[], list[str]]) -> None:
    after(1.0, lambda: send(rig.server(1), signal.SIGSTOP))
    rig.loop.run(rig.load(40))
    rig.loop.run(rig.whole())
    assert events() == ["quarantined", "restarted"]


def test_kill_the_router_in_the_middle_of_answers(rig: Rig, events: Callable[[], list[str]]) -> None:
    after(1.0, lambda: send(rig.router, signal.SIGKILL))
    rig.loop.run(rig.load(60))
    deadline = time.monotonic() + BACK_S
    while "router_restarted" not in events():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert rig.engine.take_metrics()["engine/router_restarts"] == 1
    assert "quarantined" not in events()


def test_a_server_lost_in_the_middle_of_an_update_by_tensor(rig: Rig, events: Callable[[], list[str]]) -> None:
    def lose() -> None:
        for pid in processes(rig.server(0))[1:]:  # what answers HTTP takes the update, and nobody does it
            os.kill(pid, signal.SIGSTOP)
        after(1.0, lambda: send(rig.server(0), signal.SIGKILL))

    async def both() -> None:
        load = asyncio.ensure_future(rig.load(30, over=1.0))
        await asyncio.sleep(0.3)
        await rig.update("tensor", lose)
        await load

    before = len(rig.events())
    rig.loop.run(both())
    rig.loop.run(rig.whole())
    assert events() == ["quarantined", "restarted"]
    assert rig.events()[before]["url"] == rig.server(0).url
    assert re.search("killed by signal 9|by tensor, sending bucket 0", rig.events()[before]["reason"])


def test_a_server_that_ends_of_an_update_by_disk(rig: Rig, events: Callable[[], list[str]]) -> None:
    """Its scheduler may open no more files, which ends it in the middle of loading."""

    async def both() -> None:
        load = asyncio.ensure_future(rig.load(20, over=1.0))
        for pid in processes(rig.server(1))[1:]:
            _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
        await rig.update("disk")
        await load

    before = len(rig.events())
    rig.loop.run(both())
    rig.loop.run(rig.whole())
    assert events() == ["quarantined", "restarted"]
    url, reason = rig.server(1).url, rig.events()[before]["reason"]
    assert f"weight version {rig.version} by disk, loading" in reason
    assert url.removeprefix("http://") in reason


def test_weights_that_every_server_refuses(rig: Rig, events: Callable[[], list[str]], tmp_path: Path) -> None:
    """The fault is in the weights: the update fails at once, no server is restarted, and the old weights serve."""

    async def both() -> None:
        load = asyncio.ensure_future(rig.load(30, over=1.0))
        await asyncio.sleep(0.5)
        with pytest.raises(WeightSyncError, match=r"every server that answers refused the weights.*weights iterator"):
            await rig.engine.update_weights_from_disk(tmp_path, rig.version + 1)
        await load

    rig.loop.run(both())
    assert rig.engine.pool.version_wanted == rig.version
    assert len(rig.engine.pool.ready) == 2
    assert events() == []


def test_restart_by_hand_at_the_same_port(rig: Rig, events: Callable[[], list[str]]) -> None:
    """What comes up there serves other weights, answers nobody, and keeps the port; ours comes back at another one."""
    port = rig.server(0).port
    stranger = EmbeddedServer("stranger", rig.models[(rig.version + 1) % 3][0])
    stranger.start()  # once elsewhere, so that the second start is a matter of moments
    stranger.wait()
    stranger.kill()
    stranger._port = port

    def usurp() -> None:
        killed = [psutil.Process(pid) for pid in processes(rig.server(0))]
        send(rig.server(0), signal.SIGKILL)
        psutil.wait_procs(killed, timeout=30)  # until then the port is theirs
        stranger.start()
        stranger.wait()

    async def both() -> None:
        load = asyncio.ensure_future(rig.load(60))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(usurp)
        await load

    try:
        rig.loop.run(both())
        rig.loop.run(rig.whole())
        assert stranger.alive
    finally:
        stranger.kill()
    assert rig.server(0).port != port
    assert events() == ["quarantined", "restarted"]


def test_a_server_of_other_weights_behind_the_router(rig: Rig, events: Callable[[], list[str]]) -> None:
    """Its own answers tell of it, and several of them ask all servers for their versions at once."""

    async def both() -> None:
        older = rig.version - 1
        body = {"model_path": str(rig.models[older % 3][0]), "weight_version": str(older)}
        async with rig.engine.pool.updating(30.0, AssertionError("nobody updates")):  # nor does the watch look
            await rig.engine.http.send("POST", rig.server(0).url, "/update_weights_from_disk", body)
            await rig.load(30, over=0.2)

    rig.loop.run(both())
    assert rig.engine.take_metrics()["engine/wrong_version_answers"] > 0
    rig.loop.run(rig.whole())
    assert events() == ["quarantined", "restarted"]
