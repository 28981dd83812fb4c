"""The examples of tools and of roles learn at their full size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SLIME = str(Path(sys.executable).with_name("slime"))


def learnt(cwd: Path, flags: list[str | Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    done = subprocess.run([SLIME, "train", *map(str, flags)], cwd=cwd, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "held-out accuracy" in done.stdout
    (summary,) = (cwd / "outputs").glob("*/summary.json")
    lines = summary.with_name("metrics.jsonl").read_text().splitlines()
    return json.loads(summary.read_text()), [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_model_learns_to_call_the_calculator(tmp_path: Path) -> None:
    subprocess.run([SLIME, "init", "tools", tmp_path / "run.yaml"], check=True)
    summary, steps = learnt(tmp_path, ["--config", tmp_path / "run.yaml"])
    assert summary["eval_before"] <= 0.1
    assert summary["eval_after"] >= 0.75
    calls = [step["rollout/tools/calculator/calls"] for step in steps if "rollout/tools/calculator/calls" in step]
    assert calls[0] <= 0.5
    assert calls[-1] >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_planner_learns_to_work_for_the_solver(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "examples/multi_agent", tmp_path / "examples/multi_agent")
    summary, _ = learnt(tmp_path, ["--config", folder / "run.yaml"])
    assert summary["eval_before"] <= 0.3
    assert summary["eval_after"] >= 0.8
