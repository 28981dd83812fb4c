"""`slime submit --to slurm` on real daemons: a job that ends early goes on, with the bytes of an unbroken run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.backends.slurm.conftest import ROLLOUTS, Slurm
from tests.backends.whole_runs import Run, hold, release, running
from tests.conftest import SLIME, TinyRun
from tests.run_files import last_commit, timeless

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1200), pytest.mark.xdist_group("slurm")]
GRACEFUL, LOW = ["--partition", "graceful", "--exclusive"], ["--partition", "low", "--exclusive"]


@contextmanager
def submitted(tiny: TinyRun, tmp_path: Path, words: list[str], **changes: Any) -> Iterator[tuple[Run, str]]:
    """A submitted run and its job's id; it holds in the third rollout until `release`, or goes through."""
    held = {"custom_rollout_log_function_path": hold(tmp_path, 2)}
    flags = tiny.argv(tmp_path / "run", **{"num_rollout": ROLLOUTS, **held, **changes})
    with running([SLIME, "submit", "--to", "slurm", *words, "train", *flags], tmp_path, tmp_path / "log") as run:
        run.until("job ")
        job = re.match(r"job (\d+) submitted", run.printed[-1])
        assert job, run.said()
        yield run, job[1]


def begun(run: Run) -> None:
    """Wait until the run holds."""
    run.until("rollout 2/")
    time.sleep(1)  # it draws the next rollout


def same(run_dir: Path, unbroken: Path) -> None:
    assert timeless(run_dir) == timeless(unbroken)
    assert last_commit(run_dir) == last_commit(unbroken)


def test_a_run_from_the_command_to_its_end(slurm: Slurm, tiny: TinyRun, unbroken: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with submitted(tiny, tmp_path, LOW) as (run, job):
        text = run.finish()
    assert f"rollout {ROLLOUTS}/{ROLLOUTS}" in text
    assert f"job {job} runs on slime-test-" in run.said()
    same(tmp_path / "run", unbroken)
    again = subprocess.run(
        [SLIME, "submit", "--to", "slurm", *LOW, "train", *tiny.argv(tmp_path / "run")],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert again.returncode == 2
    assert "already holds a run" in again.stderr


def test_what_slurm_refuses(slurm: Slurm, tiny: TinyRun, tmp_path: Path) -> None:
    words = ["--to", "slurm", "--partition", "none", "--no-check", "train", *tiny.argv(tmp_path / "run")]
    done = subprocess.run([SLIME, "submit", *words], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "invalid partition specified: none" in done.stderr


@pytest.mark.parametrize("partition", [GRACEFUL, LOW], ids=["with grace", "without"])
def test_a_preempted_run_loses_nothing(
    partition: list[str], slurm: Slurm, tiny: TinyRun, unbroken: Path, tmp_path: Path
) -> None:
    with submitted(tiny, tmp_path, partition) as (run, job):
        begun(run)
        slurm.preempt()
        slurm.until(job, lambda fields: fields["JobState"] != "RUNNING" or fields["PreemptTime"] != "None")
        time.sleep(2)
        release(tmp_path)
        slurm.until(job, lambda fields: fields["Restarts"] == "1" and fields["JobState"] == "RUNNING")
        text = run.finish()
    assert "ended early: " in text, "it drains"
    assert ("requeued for a job of higher priority" in text) is (partition is GRACEFUL), "else Slurm requeues it"
    assert "resumed from" in text
    assert f"job {job} runs after restart 1" in run.said()
    same(tmp_path / "run", unbroken)


@pytest.mark.parametrize("how", [[], ["--signal=TERM"]], ids=["scancel", "its signal"])
def test_a_cancelled_run_commits(how: list[str], slurm: Slurm, tiny: TinyRun, tmp_path: Path) -> None:
    with submitted(tiny, tmp_path, GRACEFUL) as (run, job):
        begun(run)
        subprocess.run(["scancel", *how, job], check=True, timeout=60)
        time.sleep(2)
        release(tmp_path)
        assert run.fail(300) == 143
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["drained"] is True
    fields = slurm.until(job, lambda fields: fields["JobState"] in ("CANCELLED", "FAILED"))
    assert fields["Restarts"] == "0"


def test_a_cancelled_run_that_cannot_drain(slurm: Slurm, tiny: TinyRun, tmp_path: Path) -> None:
    with submitted(tiny, tmp_path, GRACEFUL) as (run, job):
        begun(run)
        subprocess.run(["scancel", job], check=True, timeout=60)
        assert run.fail(300) == 143
    assert "slime: ended by SIGTERM" in run.said(), "before SIGKILL"
    assert not (tmp_path / "run" / "summary.json").exists()
    assert timeless(tmp_path / "run")[-1]["step"] == 2, "its commits are intact"


@pytest.mark.parametrize("how", ["requeue", "node"])
def test_a_run_that_starts_again(how: str, slurm: Slurm, tiny: TinyRun, unbroken: Path, tmp_path: Path) -> None:
    with submitted(tiny, tmp_path, LOW) as (run, job):
        begun(run)
        node = slurm.until(job, lambda fields: fields["JobState"] == "RUNNING")["NodeList"]
        if how == "node":
            slurm.lose_node(node)
        else:
            subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
            time.sleep(2)
        release(tmp_path)
        try:
            fields = slurm.until(job, lambda fields: fields["Restarts"] == "1" and fields["JobState"] == "RUNNING")
            assert how == "requeue" or fields["NodeList"] != node
            text = run.finish()
        finally:
            if how == "node":
                slurm.bring_back(node)
    assert "resumed from" in text
    same(tmp_path / "run", unbroken)


def test_a_run_that_is_longer_than_its_time_limit(slurm: Slurm, tiny: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    words = [*GRACEFUL, "--time", "2"]
    with submitted(tiny, tmp_path, words, num_rollout=100_000, eval_interval=None, eval_prompt_data=None) as (run, job):
        slurm.until(job, lambda fields: fields["Restarts"] == "1" and fields["JobState"] == "RUNNING", 300)
        run.until("resumed from")
        subprocess.run(["scancel", job], check=True, timeout=60)
        assert run.fail(300) == 143
    assert "requeued for its time limit" in run.said()


def test_two_nodes(slurm: Slurm, tiny: TinyRun, tmp_path: Path) -> None:
    two = {"train_backend": "embedded", "actor_num_nodes": 2, "actor_num_gpus_per_node": 1}
    with submitted(tiny, tmp_path, GRACEFUL, **two) as (run, job):
        begun(run)
        assert slurm.until(job, lambda fields: True)["NumNodes"] == "2"
        slurm.preempt()
        slurm.until(job, lambda fields: fields["PreemptTime"] != "None")
        time.sleep(2)
        release(tmp_path)
        slurm.until(job, lambda fields: fields["Restarts"] == "1" and fields["JobState"] == "RUNNING")
        text = run.finish()
    assert "3 CPU places on 2 nodes" in text
    assert "resumed from" in text
    assert [line["step"] for line in timeless(tmp_path / "run")] == list(range(ROLLOUTS + 1))


def test_ctrl_c_ends_the_printing_alone(slurm: Slurm, tiny: TinyRun, tmp_path: Path) -> None:
    with submitted(tiny, tmp_path, LOW) as (run, job):
        begun(run)
        os.kill(run.pid, signal.SIGINT)
        assert run.fail(120) == 130
    release(tmp_path)
    assert f"job {job} goes on; `scancel {job}` stops it" in run.said()
    slurm.until(job, lambda fields: fields["JobState"] == "COMPLETED")
    assert timeless(tmp_path / "run")[-1]["step"] == ROLLOUTS
