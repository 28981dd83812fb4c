"""Deltas by pullers: real pullers and versions on disk, small servers that say what SGLang says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file
from slime_engine_http.api.engine import HttpEngine
from slime_engine_http.api.worker import WorkerState
from slime_weight_transport_delta.puller import Puller, serve
from slime_weight_transport_delta.writer import DeltaWriter

from slime_core.config import Args, Settings
from slime_core.errors import ConfigError, WeightSyncError
from slime_core.plugins.presets import load_settings
from tests.unit.engines.sglang.api.servers import Server, servers


class Engine:
    """Reaction of a server that loads what it is told."""

    def __init__(self, software: str = "0.5.20") -> None:
        self.software, self.version, self.refuses, self.lies = software, "default", "", False
        self.steps: list[str] = []

    async def __call__(self, server: Server, request: web.Request, body: Any, before: int) -> Any:
        self.steps.append(request.path)
        if request.path == "/update_weights_from_disk":
            if self.refuses:
                return 400, {"success": False, "message": self.refuses}
            if not self.lies:
                self.version = body["weight_version"]
        facts = {"version": self.software, "tp_size": 1, "pp_size": 1, "device": "cpu", "weight_version": self.version}
        return {"success": True, **facts}


@asynccontextmanager
async def pullers(tmp_path: Path, *engines: Sequence[str]) -> AsyncIterator[list[str]]:
    """One per host, each with its own copy; their addresses."""
    tasks, ports = [], []
    try:
        for number, urls in enumerate(engines):
            port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            puller = Puller(tmp_path / "source", tmp_path / f"local{number}", urls, timeout=30)
            tasks.append(asyncio.create_task(serve(puller, "127.0.0.1", 0, port.set_result)))
            ports.append(f"127.0.0.1:{await port}")
        yield ports
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def http_engine(made: Sequence[Server], addresses: Sequence[str], **settings: Any) -> AsyncIterator[HttpEngine]:
    args = {"rollout_timeout": 10, "update_weight_timeout": 10, **settings}
    urls = {"rollout_external_engine_addrs": [s.address for s in made], "update_weight_puller_addrs": list(addresses)}
    engine = HttpEngine(Args(**args, **urls))
    await engine.start()
    assert engine._supervisor is not None
    engine._supervisor.stop()  # the test brings servers back
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.fixture
def writer(tmp_path: Path) -> DeltaWriter:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(400)}, tmp_path / "model" / "model.safetensors")
    made = DeltaWriter(tmp_path / "source", tmp_path / "model", run_dir="test")
    made.write([("a", torch.zeros(400))], 1)
    made.write([("a", torch.arange(400.0))], 2)
    return made


def states(engine: HttpEngine) -> list[WorkerState]:
    return [worker.state for worker in engine.pool.workers]


@pytest.mark.parametrize("fault", ["refuses", "lies"])
async def test_only_the_engine_that_failed_is_quarantined(tmp_path: Path, writer: DeltaWriter, fault: str) -> None:
    good, bad = Engine(), Engine()
    setattr(bad, fault, "out of memory")
    async with (
        servers(good, bad) as made,
        pullers(tmp_path, [s.url for s in made]) as addresses,
        http_engine(made, addresses, use_fault_tolerance=True) as engine,
    ):
        await engine.update_weights_from_delta(writer.root, 2)
        assert states(engine) == [WorkerState.READY, WorkerState.QUARANTINED]
        reason = engine.pool.workers[1].reason
        assert "weight version 2 by delta" in reason
        assert ("out of memory" if fault == "refuses" else "reports weight version 'default'") in reason
        setattr(bad, fault, "")
        await engine.catch_up(engine.pool.workers[1])
        assert bad.version == "2"
        assert engine.pool.workers[1].weight_version == 2


async def test_an_engine_that_no_puller_knows_is_named(tmp_path: Path, writer: DeltaWriter) -> None:
    async with (
        servers(Engine(), Engine()) as made,
        pullers(tmp_path, [made[0].url]) as addresses,
        http_engine(made, addresses, use_fault_tolerance=True) as engine,
    ):
        await engine.update_weights_from_delta(writer.root, 1)
        assert states(engine) == [WorkerState.READY, WorkerState.QUARANTINED]
        reason = engine.pool.workers[1].reason
        assert f"{made[1].url}: no puller loads this engine" in reason
        assert f"serves {made[0].url}" in reason
        with pytest.raises(WeightSyncError, match="no puller loads"):
            await catch_up(engine, 1)


async def catch_up(engine: HttpEngine, number: int) -> None:
    """As the supervisor does, to which both errors mean the same."""
    try:
        await engine.catch_up(engine.pool.workers[number])
    except Exception as error:
        raise WeightSyncError(str(error)) from error


def _settings(*flags: str) -> Settings:
    base = ("--hf-checkpoint", "m", "--prompt-data", "d", "--rollout-batch-size", "2", "--num-rollout", "1")
    return load_settings([*base, "--rollout-max-response-len", "8", "--rm-type", "exact", *flags], command="rollout")


def test_deltas_and_pullers_go_together() -> None:
    deltas, pullers = ("--update-weight-mode", "delta"), ("--update-weight-puller-addrs", "h:1")
    assert HttpEngine.check_settings(_settings(*deltas, *pullers)) == []
    (warning,) = HttpEngine.check_settings(_settings(*pullers))
    assert "--update-weight-puller-addrs" in warning
    assert "no effect without --update-weight-mode delta" in warning
    with pytest.raises(ConfigError, match=r"take deltas by --update-weight-puller-addrs HOST:PORT"):
        HttpEngine.check_settings(_settings(*deltas))
