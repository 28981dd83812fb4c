"""Servers compared with what was trained, by the checksums that they tell before and after they load it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from slime_engine_http.api.worker import WorkerState

from slime_core.errors import ConfigError, WeightSyncError
from tests.unit.engines.sglang.api.servers import Server, engine_at, servers
from tests.unit.engines.sglang.api.test_weight_update import Setup, setup, weights
from tests.unit.engines.sglang.api.weight_servers import WeightServer


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


async def test_weights_that_cannot_be_written_say_where_to_write_them(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with checking(tmp_path, WeightServer(), update_weight_disk_dir=str(tmp_path / "file")) as s:
        with pytest.raises(WeightSyncError, match="give --update-weight-disk-dir a directory"):
            await s.updates.check(weights(1).items())
        assert s.rules[0].paused is None


async def test_a_server_that_does_not_answer_is_no_silent_success(tmp_path: Path) -> None:
    async def lost(server: Server, request: Any, body: Any, before: int) -> Any:
        return 500, {"message": "lost a scheduler"}

    async with checking(tmp_path, WeightServer(), WeightServer(weights_checker=lost)) as s:
        with pytest.raises(WeightSyncError, match="lost a scheduler"):
            await s.updates.check(weights(1).items())
        assert s.pool.ready == [], "the run ends"


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
