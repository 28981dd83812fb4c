"""Whole weight updates against servers that follow SGLang's rules."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_engine_http.api import control
from slime_engine_http.api.control import Control
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.weights import distributed
from slime_engine_http.weights.update import WeightUpdates

from slime_core.config import Args
from slime_core.errors import ConfigError, WeightSyncError
from tests.unit.engines.sglang.api.servers import Server, die, engine_at, hang, servers
from tests.unit.engines.sglang.api.weight_servers import WeightServer

BOTH = pytest.mark.parametrize("transport", ["tensor", "distributed"])
ALL = pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Several dtypes, shapes and buckets; one tensor is larger than a bucket, one is a view, one has no element."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "bytes": torch.randint(-9, 9, (3,), dtype=torch.int8, generator=generator),
        "large": torch.randn(40, 10, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "turned": torch.randn(5, 3, generator=generator).t(),
        "empty": torch.empty(0, 4),
        "number": torch.randn((), generator=generator, dtype=torch.float64),
    }


class Setup:
    """An update's parts."""

    def __init__(self, http: Http, running: list[Server], rules: tuple[WeightServer, ...], args: Any) -> None:
        self.servers, self.rules = running, rules
        self.workers = [Worker(s.url, owned=True, state=WorkerState.READY) for s in running]
        self.pool = WorkerPool(self.workers)
        self.updates = WeightUpdates(http, self.pool, args)

    async def push(self, transport: str, version: int, given: Any = None) -> dict[str, float]:
        tensors = (weights(version) if given is None else given).items()
        if transport == "tensor":
            return await self.updates.from_tensors(tensors, version)
        if transport == "distributed":
            return await self.updates.from_broadcast(tensors, version)
        return await self.updates.from_directory(Path("/nowhere"), version)


@asynccontextmanager
async def setup(*rules: WeightServer, **args: Any) -> AsyncIterator[Setup]:
    given = {"update_weight_buffer_size": 200, "update_weight_timeout": 20.0} | args
    async with servers(*rules) as running:
        http = Http()
        await http.open()
        made = Setup(http, running, rules, Args(**given))
        try:
            yield made
        finally:
            made.updates.close()
            await http.close()


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed, "SETTLE_S", 1.0)
    yield
    deadline = time.monotonic() + 60  # a broadcast that nobody receives keeps its bucket until it times out
    while left := [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]:
        assert time.monotonic() < deadline, left
        gc.collect()
        time.sleep(0.05)


def same(found: dict[str, torch.Tensor], version: int) -> bool:
    expected = {name: tensor for name, tensor in weights(version).items() if tensor.numel()}
    return found.keys() == expected.keys() and all(
        torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in expected.items()
    )


@BOTH
@pytest.mark.parametrize("software", ["0.5.20", "0.5.23"])
async def test_every_bit_arrives_and_the_server_goes_on(transport: str, software: str) -> None:
    process = (dict(os.environ), torch.multiprocessing.get_sharing_strategy(), torch.distributed.is_initialized())
    async with setup(WeightServer(software), WeightServer("0.5.20")) as s:
        for version in (1, 2, 3):
            metrics = await s.push(transport, version)
        assert metrics["perf/update_weights_pause_time"] > 0
        for rules, worker in zip(s.rules, s.workers):
            assert same(rules.weights, 3)
            assert (rules.version, rules.paused, rules.session) == ("3", None, False)
            assert (worker.weight_version, worker.software, worker.state) == (3, rules.software, WorkerState.READY)
        assert s.pool.version_wanted == 3
        assert len(s.servers[0].asked("/init_weights_update_group")) == (transport == "distributed")
        assert len(s.servers[0].asked(f"/update_weights_from_{transport}")) > 3
    after = (dict(os.environ), torch.multiprocessing.get_sharing_strategy(), torch.distributed.is_initialized())
    assert after == process, "the trainer's"


@ALL
@pytest.mark.parametrize("failure", [die, pytest.param(hang, marks=pytest.mark.slow)])
async def test_one_server_that_fails_is_quarantined_and_the_other_is_updated(transport: str, failure: Any) -> None:
    broken = WeightServer(**{f"update_weights_from_{transport}": failure})
    limit = 20.0 if failure is die else 6.0
    async with setup(broken, WeightServer(), use_fault_tolerance=True, update_weight_timeout=limit) as s:
        began = asyncio.get_running_loop().time()
        await s.push(transport, 1)
        assert asyncio.get_running_loop().time() - began < 60
        bad, good = s.workers
        assert (bad.state, good.state) == (WorkerState.QUARANTINED, WorkerState.READY)
        assert (bad.weight_version, good.weight_version) == (None, 1)
        assert bad.reason.startswith(f"weight version 1 by {transport}, ")
        assert s.servers[0].address in bad.reason
        assert broken.paused, "half updated, it must not go on"
        assert s.rules[1].version == "1"
        assert transport == "disk" or same(s.rules[1].weights, 1)
        assert s.servers[0].asked("/abort_request")


@ALL
async def test_without_fault_tolerance_a_failure_ends_the_run(transport: str) -> None:
    async with setup(WeightServer(**{f"update_weights_from_{transport}": die}), WeightServer()) as s:
        with pytest.raises(WeightSyncError, match=f"weight version 1 by {transport}, .*{s.servers[0].address}"):
            await s.push(transport, 1)
        assert {w.state for w in s.workers} == {WorkerState.QUARANTINED}, "nobody knows what they hold"
        assert s.pool.version_wanted is None


@BOTH
async def test_a_server_that_was_away_is_sent_weights_again(transport: str) -> None:
    """As one that was restarted on its old port: it knows no group and no weights."""
    async with setup(WeightServer(), WeightServer(), use_fault_tolerance=True) as s:
        await s.push(transport, 1)
        s.pool.set_state(s.workers[0], WorkerState.QUARANTINED, "dead")
        s.rules[0].groups.clear()
        s.rules[0].weights, s.rules[0].version = {}, "default"
        await s.push(transport, 2)
        assert s.rules[0].version == "default"
        assert s.updates.last is not None
        await s.updates.catch_up(s.workers[0])
        assert same(s.rules[0].weights, 2)
        assert s.workers[0].weight_version == 2
        s.pool.set_state(s.workers[0], WorkerState.READY)
        await s.push(transport, 3)
        assert same(s.rules[0].weights, 3)
        assert same(s.rules[1].weights, 3)


async def test_weights_kept_reach_a_server_that_is_not_ours_by_broadcast() -> None:
    async with setup(WeightServer("0.5.23"), use_fault_tolerance=True) as s:
        s.workers[0].owned = False
        await s.push("distributed", 1)
        s.rules[0].weights = {}
        assert s.updates.last is not None
        await s.updates.catch_up(s.workers[0])
        assert same(s.rules[0].weights, 1)
        assert not s.servers[0].asked("/update_weights_from_tensor")


@BOTH
async def test_a_trainer_that_fails_in_the_middle_leaves_nobody_serving(transport: str) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights().items())[:3]
        raise ZeroDivisionError

    class Given:
        items = staticmethod(broken)

    async with setup(WeightServer("0.5.23" if transport == "tensor" else "0.5.20")) as s:
        with pytest.raises(ZeroDivisionError):
            await s.push(transport, 1, Given)
        assert s.workers[0].state is WorkerState.QUARANTINED
        assert s.rules[0].paused
        assert not s.rules[0].session, "or it could never be updated again"
        assert (s.pool.version_wanted, s.pool.version_coming) == (None, None)


async def test_a_server_that_reports_another_version_is_quarantined() -> None:
    async def lies(server: Server, request: Any, body: Any, before: int) -> Any:
        return {"weight_version": "41"}

    async with setup(WeightServer(model_info=lies)) as s:
        with pytest.raises(WeightSyncError, match=r"checking the version.*'41' after an update to 42"):
            await s.push("tensor", 42)
        assert s.workers[0].state is WorkerState.QUARANTINED


async def test_no_server_left_ends_the_update_unless_one_comes_back() -> None:
    async with setup(WeightServer(update_weights_from_tensor=die), use_fault_tolerance=True) as s:
        s.workers[0].awaited = True
        await s.push("tensor", 1)
        assert s.pool.version_wanted == 1
        s.workers[0].awaited = False
        with pytest.raises(WeightSyncError, match="no engine is left"):
            await s.push("tensor", 2)


async def test_a_cache_that_is_never_free_is_a_failure_but_not_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "FLUSH_TIMEOUT_S", 0.2)
    async with setup(WeightServer()) as s:
        s.rules[0].running = 1000
        with pytest.raises(WeightSyncError, match="could not be flushed"):
            await s.push("tensor", 1)
    async with setup(WeightServer(), update_weight_pause_mode="in_place") as s:
        s.rules[0].running = 1000
        await s.push("tensor", 1)
        assert s.servers[0].asked("/pause_generation") == [{"mode": "in_place"}]


async def test_what_the_caller_paused_stays_paused() -> None:
    async with setup(WeightServer(), update_weight_pause_mode="abort") as s:
        control = Control(s.updates._http, s.pool)
        await control.pause("in_place")
        s.rules[0].running = 1000  # held in place, so that the cache cannot be flushed
        await s.push("tensor", 1)
        assert s.servers[0].asked("/pause_generation") == [{"mode": "in_place"}]
        assert (s.rules[0].paused, s.rules[0].version) == ("in_place", "1")
        await control.resume()
        s.rules[0].running = 0
        await s.push("tensor", 2)
        assert s.servers[0].asked("/pause_generation") == [{"mode": "in_place"}, {"mode": "abort"}]
        assert (s.rules[0].paused, s.rules[0].version) == (None, "2")


async def test_an_update_waits_for_the_server_that_is_being_brought_back() -> None:
    async with setup(WeightServer()) as s:
        s.pool.update_lock.acquire()
        pushing = asyncio.create_task(s.push("tensor", 1))
        done, _ = await asyncio.wait([pushing], timeout=0.1)
        assert not done
        assert not s.servers[0].calls
        s.pool.update_lock.release()
        await pushing
        assert not s.pool.update_lock.locked()


@pytest.mark.slow
async def test_one_group_for_all_servers_loses_only_the_one_that_died() -> None:
    """The layout that nccl gets: the others are sent the bucket again in a new group."""

    async def fall(server: Server, request: Any, body: Any, before: int) -> Any:
        broken.groups.clear()
        return await die(server, request, body, before)

    broken = WeightServer(update_weights_from_distributed=fall)
    async with setup(broken, WeightServer(), WeightServer(), use_fault_tolerance=True, update_weight_timeout=10.0) as s:
        s.updates._groups = distributed.Groups(s.pool, one_for_all=True)
        await s.push("distributed", 1)
        assert [w.state for w in s.workers] == [WorkerState.QUARANTINED, WorkerState.READY, WorkerState.READY]
        assert same(s.rules[1].weights, 1)
        assert same(s.rules[2].weights, 1)
        sizes = [body["world_size"] for body in s.servers[1].asked("/init_weights_update_group")]
        assert sizes == [4, 3]


async def test_a_pause_that_a_server_does_not_know_is_refused() -> None:
    async with setup(WeightServer("0.5.20"), update_weight_pause_mode="retract") as s:
        with pytest.raises(ConfigError, match=r"retract: .* runs version 0.5.20.*allowed: abort, in_place"):
            await s.updates.transports()
    async with setup(WeightServer("0.5.21"), update_weight_pause_mode="retract") as s:
        assert "tensor" in await s.updates.transports()


# -- weights that servers refuse ---------------------------------------------------------------------------


def refusing(message: str, status: int = 400) -> Any:
    async def react(server: Server, request: Any, body: Any, before: int) -> Any:
        return status, {"success": False, "message": message}

    return react


NO_FILES, BAD_SHAPES = "Failed to get weights iterator: none.", "Failed to update weights: shapes.\nRolling back"


@pytest.mark.parametrize("tolerant", [False, True])
@pytest.mark.parametrize("status", [200, 400])
async def test_refused_before_anything_is_written_the_old_weights_serve(tolerant: bool, status: int) -> None:
    refusal = refusing(NO_FILES, status)
    rules = [WeightServer(update_weights_from_disk=refusal), WeightServer(update_weights_from_disk=refusal)]
    async with setup(*rules, use_fault_tolerance=tolerant) as s:
        await s.push("tensor", 1)
        with pytest.raises(WeightSyncError, match="weight version 2 by disk, loading /nowhere: every server that answ"):
            await s.push("disk", 2)
        assert {w.state for w in s.workers} == {WorkerState.READY}
        assert [(r.paused, r.version) for r in rules] == [(None, "1")] * 2
        assert (s.pool.version_wanted, s.pool.version_coming) == (1, None)
        assert not s.servers[0].asked("/abort_request")
        await s.push("disk", 3)
        assert s.pool.version_wanted == 3


@ALL
async def test_refused_in_the_middle_nobody_serves_and_nobody_is_waited_for(transport: str) -> None:
    """The fault is in the weights, so restarting servers, which fault tolerance would do, helps nobody."""

    async def took_and_refuses(server: Server, request: Any, body: Any, before: int) -> Any:
        await getattr(s.rules[server.number], f"update_weights_from_{transport}")(body | {"weight_version": None})
        return 400, {"success": False, "message": BAD_SHAPES}

    broken = {f"update_weights_from_{transport}": took_and_refuses}
    async with setup(WeightServer(**broken), WeightServer(**broken), use_fault_tolerance=True) as s:
        with pytest.raises(WeightSyncError, match=r"every server that answers refused the weights: .*shapes"):
            await s.push(transport, 1)
        assert {w.state for w in s.workers} == {WorkerState.QUARANTINED}
        assert [r.paused for r in s.rules] == ["abort", "abort"]
        assert s.pool.version_wanted is None


async def test_a_step_that_takes_too_long_names_server_transport_phase_and_setting() -> None:
    """As when its scheduler is frozen and what answers HTTP is not."""
    async with setup(WeightServer(update_weights_from_disk=hang), update_weight_timeout=0.3) as s:
        expected = rf"weight version 1 by disk, loading /nowhere: .*{s.servers[0].address}.*--update-weight-timeout"
        with pytest.raises(WeightSyncError, match=expected):
            await s.push("disk", 1)


# -- servers compared with what was trained --------------------------------------------------------------


@asynccontextmanager
async def checking(tmp_path: Path, *rules: WeightServer, **args: Any) -> AsyncIterator[Setup]:
    """Servers that have taken version 1."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    given = {"hf_checkpoint": str(model), "run_dir": str(tmp_path / "run"), "check_weight_update_equal": True} | args
    async with setup(*rules, **given) as s:
        await s.push("disk" if "slime" in rules[0].software else "tensor", 1)
        yield s


@pytest.mark.parametrize("software", ["0.5.20", "0.5.23"])
async def test_the_server_that_differs_is_named_and_quarantined(software: str, tmp_path: Path) -> None:
    async with checking(tmp_path, WeightServer(software), WeightServer(software)) as s:
        await s.updates.check(weights(1).items())
        assert [rules.paused for rules in s.rules] == [None, None]
        assert s.pool.version_wanted == 1
        s.rules[1].weights["half"][2] += 1
        with pytest.raises(WeightSyncError, match="serves half otherwise than trained") as raised:
            await s.updates.check(weights(1).items())
        good, bad = s.workers
        assert bad.url in str(raised.value)
        assert good.url not in str(raised.value)
        assert bad.state is WorkerState.QUARANTINED
        assert s.rules[1].paused is not None, "whatever it holds does not serve"
    assert list((tmp_path / "run").iterdir()) == []


async def test_under_fault_tolerance_the_others_go_on(tmp_path: Path) -> None:
    async with checking(tmp_path, WeightServer(), WeightServer(), use_fault_tolerance=True) as s:
        for worker in s.workers:
            worker.awaited = True
        kept = s.updates.last
        s.rules[0].weights = dict(weights(2))
        await s.updates.check(weights(1).items())
        assert [w.state for w in s.workers] == [WorkerState.QUARANTINED, WorkerState.READY]
        assert s.updates.last is kept, "for the one that is brought back"
        await s.updates.catch_up(s.workers[0])
        assert (s.rules[0].version, s.workers[0].weight_version) == ("1", 1)


async def test_a_server_that_cannot_tell_is_refused_at_the_start() -> None:
    async def unknown(server: Server, request: Any, body: Any, before: int) -> Any:
        return 404, {}

    async def staged(server: Server, request: Any, body: Any, before: int) -> Any:
        return {"version": "0.5.23", "tp_size": 1, "pp_size": 2}

    async with servers(WeightServer(weights_checker=unknown)) as (server,):
        async with engine_at(server):
            assert server.asked("/weights_checker") == []
        with pytest.raises(ConfigError, match=f"--check-weight-update-equal: {server.url} does not tell checksums"):
            async with engine_at(server, check_weight_update_equal=True):
                pass
    async with servers(WeightServer(server_info=staged)) as (server,):
        with pytest.raises(ConfigError, match="is pipeline-parallel"):
            async with engine_at(server, check_weight_update_equal=True):
                pass
