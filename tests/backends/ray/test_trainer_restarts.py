"""A trainer's process that is killed under Ray: new ranks from the last commit, the same rollout actor and engine."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from slime_runs.files import read_lines

from tests.backends.ray.actors import actors, begun, ended, files, struck, verified
from tests.backends.ray.conftest import ROLLOUTS
from tests.conftest import TinyRun
from tests.run_files import timeless

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

_TWICE = {"num_rollout": ROLLOUTS, "max_trainer_restarts": 2}


@pytest.mark.smoke
def test_the_run_ends_as_if_nothing_had_been(
    tiny: TinyRun, inline: Path, cluster: str, slime: Any, tmp_path: Path
) -> None:
    with begun(tiny, cluster, tmp_path, held=True, **_TWICE) as run:
        before, after = struck(run, tmp_path, "trainer-rank-0", {"trainer-rank-0"})
        run.finish()
    assert before.keys() == after.keys() == {"trainer-rank-0", "rollout", "engine"}
    assert {name for name in before if before[name] != after[name]} == {"trainer-rank-0"}
    assert "trainer rank 0 on " in run.said()
    assert "restart 1 of 2 from rollout_" in run.said()
    assert [event["event"] for event in read_lines(tmp_path / "run" / "events.jsonl")] == ["trainer_restart"]
    verified(tmp_path / "run", slime, ROLLOUTS)
    assert timeless(tmp_path / "run") == timeless(inline)
    assert files(tmp_path / "run") == files(inline)


_BY_DELTAS = {"update_weight_mode": "delta", "check_weight_update_equal": True}
_MANY_BUCKETS = {"update_weight_buffer_size": 1 << 16}


@pytest.mark.parametrize(("mode", "how"), [("one-step", _BY_DELTAS), ("full", _MANY_BUCKETS)], ids=["one-step", "full"])
def test_asynchronous(mode: str, how: Any, tiny: TinyRun, cluster: str, slime: Any, tmp_path: Path) -> None:
    changes = {"async": True, "async_mode": mode, "eval_in_background": True, **how}
    changes |= {"train_backend": "embedded", "actor_num_gpus_per_node": 2}
    with begun(tiny, cluster, tmp_path, held=True, **_TWICE, **changes) as run:
        before, after = struck(run, tmp_path, "trainer-rank-1", {"trainer-rank-0", "trainer-rank-1"})
        run.finish()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"trainer-rank-0", "trainer-rank-1"}, "all ranks are made anew"
    assert "trainer rank 1 on " in run.said()
    verified(tmp_path / "run", slime, ROLLOUTS)


def test_too_many_deaths_end_the_run(tiny: TinyRun, cluster: str, tmp_path: Path) -> None:
    with begun(tiny, cluster, tmp_path, num_rollout=10_000, max_trainer_restarts=1) as run:
        first = actors(tmp_path / "run")["trainer-rank-0"]
        os.kill(first, signal.SIGKILL)
        reached = (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n")  # a line may be half written
        run.until(f"rollout {reached + 2}/")
        os.kill(actors(tmp_path / "run")["trainer-rank-0"], signal.SIGKILL)
        assert run.fail(120) == 1
    [line] = [line for line in run.said().splitlines() if line.startswith("slime: error:")]
    assert "trainer rank 0 on " in line
    assert "given up after 1 restart (--max-trainer-restarts 1)" in run.said()
    assert str(tmp_path / "run" / "actors" / "trainer-rank-0.log") in run.said()


@pytest.mark.parametrize("name", ["trainer-rank-0", "rollout", "engine"])
def test_a_death_that_nobody_survives_is_named_with_its_log_and_load_goes_on(
    name: str, tiny: TinyRun, cluster: str, slime: Any, tmp_path: Path
) -> None:
    restarts = 0 if name.startswith("trainer") else 2
    with begun(tiny, cluster, tmp_path, num_rollout=10_000, max_trainer_restarts=restarts) as run:
        os.kill(actors(tmp_path / "run")[name], signal.SIGKILL)
        assert run.fail(120) == 1
    [line] = [line for line in run.said().splitlines() if line.startswith("slime: error:")]
    assert f"{name.replace('-', ' ')} on {socket.gethostname()} (" in line
    assert str(tmp_path / "run" / "actors" / f"{name}.log") in run.said()
    assert "restart 1 of" not in run.said()
    ended(tmp_path / "run")
    assert list((tmp_path / "run" / "waits").iterdir()) == []
    reached = max(line["step"] for line in timeless(tmp_path / "run")) + 1
    done = slime("train", *tiny.argv(tmp_path / "run", load=tmp_path / "run", num_rollout=reached))
    assert "resumed from" in done.stdout
    assert slime("ledger", "verify", tmp_path / "run").returncode == 0
