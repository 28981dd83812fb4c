"""Rewards that hang, raise, answer nonsense or end their process: the run goes on and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Slime, TinyRun
from tests.run_files import metrics

BAD = """
import os, signal, time

def reward(args, sample, **kwargs):
    case = sample.index % 8
    if case == 0:
        time.sleep(1000)
    if case == 1:
        raise ValueError("no gold answer")
    if case == 2:
        return "x"
    if case == 3:
        return float("nan")
    if case == 4:
        os._exit(3)
    if case == 5:
        os.kill(os.getpid(), signal.SIGSEGV)
    return float(case == 6)
"""
REASONS = ["no answer within --rm-timeout", "no gold answer", "returned str", "nan", "exit status 3", "SIGSEGV"]


@pytest.mark.slow
def test_the_run_goes_on_and_every_failure_can_be_replayed(slime: Slime, tiny: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    run = tmp_path / "run"
    flags = {
        "custom_rm_path": tmp_path / "bad.py", "rm_timeout": 2, "rm_workers": 2, "rollout_batch_size": 2,
        "n_samples_per_prompt": 8, "num_rollout": 2, "num_steps_per_rollout": 1, "eval_interval": None,
        "save_debug_rollout_data": tmp_path / "{rollout_id}.jsonl",
    }  # fmt: skip
    slime("train", *tiny.argv(run, **flags), OF_THIS_TEST=str(tmp_path))
    rows = metrics(run)
    assert [row["rollout/failed_ratio"] for row in rows if "train/loss" in row] == [0.75, 0.75]
    samples = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    assert len(samples) == 16, "no sample is lost"
    for sample in samples:
        case = sample["index"] % 8
        if case < len(REASONS):
            assert sample["status"] == "failed"
            assert sample["reward"] is None
            assert REASONS[case] in sample["metadata"]["failure"]["error"], case
        else:
            assert sample["reward"] == float(case == 6)
    saved = sorted((run / "failures").glob("reward-*.json"))
    assert len(saved) == 24
    replay = ("rewards", "replay", *saved, "--with")
    again = slime(*replay, tmp_path / "bad.py", "--rm-timeout", 1, check=False)
    assert again.returncode == 1, "the same function fails again"
    (tmp_path / "mended.py").write_text("def reward(args, sample, **kwargs):\n    return 0.25\n")
    done = slime(*replay, tmp_path / "mended.py", "--diff")
    assert "0.25" in done.stdout
    assert done.stdout.count("  response: ") == 24
    assert [p for p in psutil.process_iter() if _is_worker(p) and _is_of(tmp_path, p)] == []


@pytest.mark.slow
def test_workers_end_with_a_driver_that_is_killed(tiny: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef reward(args, sample, **kwargs):\n    time.sleep(1000)\n")
    argv = tiny.argv(tmp_path / "run", custom_rm_path=tmp_path / "slow.py", rm_workers=2)
    with subprocess.Popen([sys.executable, "-m", "slime_core", "train", *argv], stderr=subprocess.DEVNULL) as driver:
        workers: list[psutil.Process] = []
        while len(workers) < 2:
            assert driver.poll() is None
            workers = [p for p in psutil.Process(driver.pid).children(recursive=True) if _is_worker(p)]
        driver.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "slime_rewards.processes.scoring" in " ".join(words := process.cmdline()) and "--control" not in words
    except psutil.Error:
        return False


def _is_of(test: Path, process: psutil.Process) -> bool:
    """Other tests, in other processes, have workers too."""
    try:
        return process.environ().get("OF_THIS_TEST") == str(test)
    except psutil.Error:
        return False


def test_metadata_of_a_score_is_an_object(refused: Any) -> None:
    said = refused("rewards", "score", "--with", "exact", "--response", "4", "--metadata", "[1]", status=2)
    assert "--metadata [1]: must be a JSON object" in said
