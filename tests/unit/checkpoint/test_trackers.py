"""Trackers: the metrics file over a resume, and the lines a person sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slime_hooks.trackers.progress import ProgressTracker

from slime_core.checkpoint.run_dir import JsonlTracker, cut_after
from slime_core.config import Args, EvalDataset


def _args(**changes):
    base = {"start_rollout_id": 0, "num_rollout": 4, "eval_datasets": [EvalDataset(name="held", path="held.jsonl")],
            "compute_advantages_and_returns": True}  # fmt: skip
    return Args(**{**base, **changes})


def _steps(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_after_the_checkpoint_are_cut_on_resume(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.slime_run_start(_args(), tmp_path)
    for step in range(4):
        tracker.slime_log_metrics(step, {"a": 1.0})
    tracker.slime_run_end(None)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')  # killed while writing
    resumed = JsonlTracker()
    resumed.slime_run_start(_args(start_rollout_id=2), tmp_path)
    assert _steps(tmp_path) == [0, 1, 2, 3], "the resume may be refused yet"
    cut_after(tmp_path, 2)
    assert _steps(tmp_path) == [0, 1, 2]
    resumed.slime_log_metrics(3, {"a": 2.0})
    resumed.slime_run_end(None)
    assert _steps(tmp_path) == [0, 1, 2, 3]


def test_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tracker = ProgressTracker()
    tracker.slime_run_start(_args(), tmp_path)
    tracker.slime_log_metrics(0, {"eval/held": 0.25})
    tracker.slime_log_metrics(1, {"rollout/raw_reward": 0.5, "train/loss": -0.1, "perf/tokens_per_sec": 1234.5})
    tracker.slime_run_end(None)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "rollout 0/4  held-out 0.250"
    assert second.startswith("rollout 1/4  reward 0.500  loss -0.1000  tok/s 1234  left ")
    tracker = ProgressTracker()
    tracker.slime_run_start(_args(compute_advantages_and_returns=False, eval_datasets=[]), tmp_path)
    tracker.slime_log_metrics(1, {"rollout/raw_reward": 0.0, "train/loss": 2.0})
    assert "reward" not in capsys.readouterr().out
