"""A tracker whose server takes requests and never answers costs its numbers, and not the run."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from slime_runs import Run

from tests.conftest import TinyRun

OPTIONS = ("--set", "plugins.trackers.deadline=0.2", "--set")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variable"), [("mlflow", "MLFLOW_TRACKING_URI"), ("otel", "OTEL_EXPORTER_OTLP_ENDPOINT")]
)
def test_a_server_that_never_answers(
    name: str, variable: str, tiny: TinyRun, slime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{silent.getsockname()[1]}")
        argv = tiny.argv(tmp_path, run_dir=tmp_path, num_rollout=2, save_interval=None)
        done = slime("train", *argv, *OPTIONS, f"plugins.trackers.use=[{name}]")
    assert f"tracker {name} has not ended within 0.2 s" in done.stderr
    run = Run(tmp_path)
    assert (run.state(), len(run.series("rollout/raw_reward"))) == ("ended", 2)
