"""The examples of tools and of roles: roles at a reduced size as they run, both at full size as they learn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slime_data.saved import read_samples

from slime_core.config import load_settings
from slime_core.launch import run
from slime_core.plugins.resolve import resolve
from slime_core.sample import Sample

ROOT = Path(__file__).parents[2]
SLIME = str(Path(sys.executable).with_name("slime"))
ROLES = ["--config", str(ROOT / "examples/multi_agent/run.yaml")]
ROLES += ["--prepare-path", str(ROOT / "examples/multi_agent/prepare.py")]


def reduced(
    folder: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, **sizes: float
) -> tuple[list[dict[str, Any]], list[Sample]]:
    """Two rollouts after a warm-up of other sizes: metrics, and the samples of the second."""
    recipe = resolve("recipes", flags[flags.index("--prepare-path") + 1]).obj
    for name, size in sizes.items():
        monkeypatch.setitem(recipe.__globals__, name, size)
    argv = [*flags, "--save", str(folder / "run"), "--hf-checkpoint", str(folder / "in/model"), "--num-rollout", "2"]
    argv += ["--prompt-data", str(folder / "in/train.jsonl"), "--eval-prompt-data", "x", str(folder / "in/x.jsonl")]
    argv += ["--rollout-batch-size", "8", "--eval-interval", "2", "--no-preflight", "--rm-workers", "1"]
    argv += ["--save-debug-rollout-data", str(folder / "{rollout_id}.jsonl")]
    run(load_settings(argv, command="train", env={}))
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], read_samples(folder / "1.jsonl")


@pytest.mark.slow
def test_roles_at_a_reduced_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"NUM_PLANS": 448, "NUM_ANSWERS": 224, "NUM_MIXED": 496, "NUM_HELD_OUT": 8}
    steps, samples = reduced(tmp_path, ROLES, monkeypatch, **sizes)
    assert any("eval/x" in step for step in steps)
    by_rollout: dict[int | None, dict[str, Sample]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout_id, {})[sample.metadata["role"]] = sample
    assert len(by_rollout) == 64
    whole = [roles for roles in by_rollout.values() if len(roles) == 2]
    assert whole
    for roles in whole:
        assert roles["planner"].reward == roles["solver"].reward
        assert all(sample.rollout_log_probs for sample in roles.values())


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
