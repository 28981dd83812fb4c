"""`slime rehearse` starts the run's own servers on CPU, with the small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Slime, TinyRun

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1200)]


def rehearsed_with_a_server(slime: Slime, tiny: TinyRun, root: Path, engine: str, python: Path, *flags: str) -> None:
    argv = tiny.argv(root / "run", num_rollout=40, eval_interval=10, num_steps_per_rollout=None)
    argv += ["--rollout-engine", engine, "--engine-python", str(python), "--rollout-num-gpus", "8", "--colocate"]
    argv += ["--rollout-num-gpus-per-engine", "2", "--actor-num-gpus-per-node", "8", "--global-batch-size", "16"]
    argv += ["--train-backend", "embedded", *flags]  # in one process, so that most of the time is the server's
    options = ["--json", "--num-gpus", "8", "--processes", "1", "--seconds", "500"]
    done = slime("rehearse", *options, *argv, check=False, timeout=1200)
    report = json.loads(done.stdout)
    stages = {row["stage"]: row["result"] for row in report["stages"]}
    assert [p for p in report["problems"] if p["level"] == "error"] == [], report
    assert f"a server of {engine}; killed" in stages["run"], report
    assert "commit after rollout" in stages["resume"], report
    assert f"--rollout-engine {engine}: one server of one process, on this CPU" in report["not_rehearsed"]


def test_sglang_is_rehearsed(slime: Slime, tiny: TinyRun, tmp_path: Path, sglang_python: Path) -> None:
    flags = ["--sglang-mem-fraction-static", "0.7", "--sglang-attention-backend", "flashinfer"]
    rehearsed_with_a_server(slime, tiny, tmp_path, "sglang", sglang_python, *flags)
