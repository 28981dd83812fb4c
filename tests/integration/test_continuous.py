"""`--async --async-mode full` through the command line: it learns, keeps its promises on age, and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Slime, TinyRun
from tests.run_files import metrics

FULL: dict[str, Any] = {"async": True, "async_mode": "full", "max_staleness": 2}

SIGTERM_WHILE_TRAINING = """
import os, signal

def postprocess(args, rollout_id, data):
    if str(rollout_id) == os.environ.get("AT"):
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_a_run_learns_on_samples_that_are_not_too_old(tiny: TinyRun, tmp_path: Path, slime: Slime) -> None:
    save = tmp_path / "run"
    flags = {**FULL, "num_rollout": 12, "save_interval": 12, "eval_interval": 12, "use_tis": True}
    slime("train", *tiny.argv(save, **flags))
    lines = metrics(save)
    assert [line["step"] for line in lines] == list(range(13))
    rewards = [line["rollout/raw_reward"] for line in lines[1:]]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5
    ages = [line["rollout/staleness/max"] for line in lines[1:]]
    assert max(ages) in (1, 2)
    assert all(0 <= line["perf/engine_idle_fraction"] <= 1 for line in lines[1:])
    assert json.loads((save / "summary.json").read_text())["eval_after"] > lines[0]["eval/held"]
    assert "the ledger holds" in slime("ledger", "verify", save).stdout


@pytest.mark.slow
def test_a_run_goes_on_with_the_groups_of_its_commit_in_the_other_mode(
    tiny: TinyRun, tmp_path: Path, slime: Slime
) -> None:
    save = tmp_path / "run"
    flags: dict[str, Any] = {"async": True, "save_interval": 1, "eval_interval": None, "eval_prompt_data": None}
    for rollouts, mode, step in ((3, "full", None), (5, "one-step", 1), (6, "full", 3)):
        resumed = {} if step is None else {"load": save, "ckpt_step": step}
        if step is not None:
            held = save / "checkpoints" / f"rollout_{step:07d}" / "open_groups.jsonl"
            assert held.read_text(), "generation went on beside the training"
        done = slime("train", *tiny.argv(save, **flags, **resumed, async_mode=mode, num_rollout=rollouts))
        assert ("generated ahead by a run of another mode" in done.stderr) == (step is not None)
        assert "the ledger holds" in slime("ledger", "verify", save).stdout
    assert [line["step"] for line in metrics(save)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_sigterm_gives_back_what_is_in_flight_and_the_run_goes_on(tiny: TinyRun, tmp_path: Path, slime: Slime) -> None:
    save, hook = tmp_path / "run", tmp_path / "hook.py"
    hook.write_text(SIGTERM_WHILE_TRAINING)
    flags = {**FULL, "num_rollout": 4, "save_interval": 4, "eval_interval": None, "eval_prompt_data": None}
    argv = tiny.argv(save, **flags, rollout_data_postprocess_path=f"{hook}:postprocess")
    first = slime("train", *argv, AT="1")
    assert "2 of 4 rollouts done and committed" in first.stdout
    slime("ledger", "verify", save)
    slime("train", *argv, "--load", save)
    assert [line["step"] for line in metrics(save)] == [1, 2, 3, 4]
    slime("ledger", "verify", save)
