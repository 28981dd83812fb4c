"""The demo learns on every seed, asynchronously too, and random rewards teach nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_files import metrics

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "demo_seeds.py"
SLIME = str(Path(sys.executable).with_name("slime"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seeds", "rollouts"), [("0", 40), ("1 2 3 4", 12)], ids=["to the end", "the beginning"])
def test_five_seeds_learn_and_their_controls_do_not(seeds: str, rollouts: int) -> None:
    """One goes to the end. The learning rate is constant: a run of fewer rollouts is the beginning of that."""
    flags = f"--num-rollout {rollouts} --eval-interval {rollouts}"
    command = [sys.executable, SCRIPT, "--seeds", *seeds.split(), "--flags", flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_asynchronous_demo_learns(tmp_path: Path) -> None:
    subprocess.run([SLIME, "init", "demo", "demo.yaml"], cwd=tmp_path, check=True)
    files = ["--config", "demo.yaml", "--config", ROOT / "examples/demo-async.yaml", "--save", "outputs/demo-async"]
    done = subprocess.run(
        [SLIME, "train", *files, "--num-rollout", "15"], cwd=tmp_path, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "outputs" / "demo-async"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_before"] <= 0.4
    assert summary["eval_after"] >= 0.9
    steps = metrics(run)
    ages = [step["rollout/staleness/max"] for step in steps if "rollout/staleness/max" in step]
    assert len(ages) == 15
    assert 1 <= max(ages) <= 2
