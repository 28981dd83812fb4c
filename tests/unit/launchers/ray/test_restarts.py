"""Restarts of trainer ranks: how many, from where, after what pause, and what a living run goes back to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slime_launcher_ray.restarts import Restart, Restarts, rewind
from slime_runs.events import EventLog
from slime_runs.files import read_lines

from slime_core.checkpoint.run_dir import JsonlTracker
from slime_core.checkpoint.store import CheckpointStore
from slime_core.errors import CheckpointError, TrainError
from slime_core.launch.journal import Journal

DEATH = TrainError("rank 1 of 2 (process 7) was killed by SIGKILL")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def _commit(store: CheckpointStore, rollout_id: int, **state: Any) -> Path:
    return store.commit(rollout_id, state, [])


def _restarts(limit: int, store: CheckpointStore, tmp_path: Path) -> Restarts:
    return Restarts(limit, store, EventLog(tmp_path))


def test_without_the_setting_the_death_ends_the_run(store: CheckpointStore, tmp_path: Path) -> None:
    _commit(store, 0)
    with pytest.raises(TrainError) as caught:
        _restarts(0, store, tmp_path).after(DEATH, 1)
    assert caught.value is DEATH


def test_each_restart_is_from_the_last_commit_and_recorded(store: CheckpointStore, tmp_path: Path) -> None:
    restarts = _restarts(2, store, tmp_path)
    first = _commit(store, 0)
    assert restarts.after(DEATH, 1) == Restart(first, 1, 2, 0.0)
    second = _commit(store, 3)
    granted = restarts.after(DEATH, 5)
    assert str(granted) == "restart 2 of 2 from rollout_0000003; the engines stay"
    assert granted.commit == second
    with pytest.raises(TrainError, match=r"by SIGKILL; given up after 2 restarts \(--max-trainer-restarts 2\)"):
        restarts.after(DEATH, 6)
    told = [{k: v for k, v in event.items() if k != "time"} for event in read_lines(tmp_path / "events.jsonl")]
    assert [event["rollout_id"] for event in told] == [1, 5]
    assert told[0] == {
        "event": "trainer_restart", "error": str(DEATH), "rollout_id": 1, "commit": first.name, "restart": 1,
        "limit": 2,
    }  # fmt: skip


def test_pauses_grow_while_nothing_is_achieved(store: CheckpointStore, tmp_path: Path) -> None:
    restarts = _restarts(8, store, tmp_path)
    _commit(store, 0)
    assert [restarts.after(DEATH, 1).pause_s for _ in range(6)] == [0, 5, 10, 20, 40, 60]
    _commit(store, 1)
    assert restarts.after(DEATH, 2).pause_s == 0


def test_nothing_to_go_back_to(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"not restarted, since there is no commit yet in .* --save-interval"):
        _restarts(3, store, tmp_path).after(DEATH, 0)
    (_commit(store, 0) / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"torn: state\.json"):
        _restarts(3, store, tmp_path).after(DEATH, 1)


class _Side:
    """Trainer, stage and weights at once: notes what it is told to load."""

    def __init__(self) -> None:
        self.version = 9
        self.loaded: list[tuple[Any, ...]] = []

    def load(self, commit: Path, *rollout: int) -> None:
        self.loaded.append((commit.name, *rollout))


class _Hooks:
    """A hook relay without plugins."""

    def __getattr__(self, name: str) -> Any:
        return lambda **kwargs: []


def test_what_came_after_the_commit_is_void(tmp_path: Path) -> None:
    class Args:
        save = None
        eval_datasets = None
        keep_checkpoints = None
        save_hf = None
        start_rollout_id = 0
        save_timeout = None

    tracker = JsonlTracker()
    tracker.slime_run_start(args=Args, run_dir=tmp_path)
    facts = {"weight_version": 4, "unfinished_evaluations": [2]}
    journal = Journal(Args, tmp_path, _Hooks(), [], lambda: facts, [], 0.0)
    journal.evals = {"held": {"before": 0.1, "after": 0.2}}
    for step in (0, 1, 2):
        tracker.slime_log_metrics(step=step, metrics={"x": step})
    journal.save(1)
    kept = journal.checkpoint
    tracker.slime_log_metrics(step=2, metrics={"x": 22})  # of the evaluation that the commit has as unfinished
    journal.save(2)
    tracker.slime_log_metrics(step=3, metrics={"x": 3})
    journal.evals["held"]["after"] = 0.9
    assert kept is not None
    trainer, stage, weights = _Side(), _Side(), _Side()
    start = rewind(Restart(kept, 1, 1, 0.0), trainer=trainer, stage=stage, weights=weights, journal=journal)
    tracker.slime_log_metrics(step=3, metrics={"x": 33})
    tracker.slime_run_end(error=None)
    assert start == 2
    assert trainer.loaded == [(kept.name,)]
    assert stage.loaded == [(kept.name, 1)]
    assert weights.version == 3  # the next push is the commit's version
    assert journal.store.commits() == [kept]
    assert journal.evals == {"held": {"before": 0.1, "after": 0.2}}
    assert journal.seconds_before == 0.0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["x"]) for line in lines] == [(0, 0), (1, 1), (2, 2), (3, 33)]
