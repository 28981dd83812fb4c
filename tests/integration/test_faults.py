"""A full disk, a directory that goes, data that change: each ends with one line, and the last commit is whole.

A function of the run itself makes the fault, in its second training step, so no test waits for one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slime_core.checkpoint.store import find
from tests.conftest import Slime, TinyRun

SLOW = pytest.mark.slow
"""Runs in `make test-backends`: the same paths as the others."""
FLAGS: dict[str, Any] = {
    "num_rollout": 3, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 4,
    "eval_interval": None, "eval_prompt_data": None,
}  # fmt: skip
FAULTS = '''
import os, resource, shutil
from pathlib import Path

def fault(args, rollout_id, data):
    """In the second training step."""
    kind, _, size = os.environ.get("FAULT", "").partition(" ")
    if rollout_id != 1 or not kind:
        return
    run = Path(args.run_dir)
    if kind == "removed":
        shutil.rmtree(run)
        return
    # No file may grow beyond this: what a full disk does, with another number (EFBIG).
    limit = int(size or (run / "metrics.jsonl").stat().st_size + 10)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
'''
HINT = "make space"


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "faults.py"
    path.write_text(FAULTS)
    return path


@pytest.mark.parametrize(
    ("kind", "flags", "said"),
    [
        ("full 100000", {}, "cannot save to {run}/checkpoints/rollout_0000001: "),
        pytest.param("full 4000", {}, "cannot save to {run}/checkpoints/rollout_0000001: ", marks=SLOW),
        pytest.param(
            "metrics",
            {"save_interval": 3},
            "{run}/metrics.jsonl: no space for a step's metrics. Checkpoints are intact",
            marks=SLOW,
        ),
        pytest.param(
            "full 10000",
            {
                "n_samples_per_prompt": 16,
                "save_interval": 3,
                "save_debug_train_data": "{run}/debug/{{rollout_id}}.jsonl",
            },
            "{run}/debug/1.jsonl cannot be written: ",
            marks=SLOW,
        ),
    ],
    ids=["commit: weights", "commit: anything", "metrics", "debug dump"],
)
def test_a_full_disk(
    tiny: TinyRun, fault: Path, tmp_path: Path, slime: Slime, kind: str, flags: dict[str, Any], said: str
) -> None:
    run = tmp_path / "run"
    own = {name: value.format(run=run) if isinstance(value, str) else value for name, value in flags.items()}
    argv = tiny.argv(run, **{**FLAGS, **own, "no_trace": True}, rollout_data_postprocess_path=f"{fault}:fault")
    done = slime("train", *argv, check=False, FAULT=kind)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("slime: error: " + said.format(run=run))
    assert HINT in last or "Free space in" in last
    assert "Traceback" not in done.stderr
    commit = find(run)  # verified
    assert (commit is None) == ("save_interval" in flags)
    assert commit is None or commit.name == "rollout_0000000"
    assert last.endswith(f"with --load {run} goes on from there" if commit else "with --overwrite starts again")
    left = [p.name for p in (run / "checkpoints").glob(".partial*")] if commit else []
    assert left == []  # what was begun does not take the space that is missing
    slime("train", *argv, "--load", run)
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_the_run_directory_goes(tiny: TinyRun, fault: Path, tmp_path: Path, slime: Slime) -> None:
    run = tmp_path / "run"
    argv = tiny.argv(run, **FLAGS, save_interval=1, rollout_data_postprocess_path=f"{fault}:fault")
    done = slime("train", *argv, check=False, FAULT="removed")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"slime: error: {run} has been moved or removed while the run wrote to it")
    assert "goes on from there" not in last
    assert "make space" not in last
    assert not run.exists()


def test_a_place_where_nothing_can_be_written(tiny: TinyRun, slime: Slime) -> None:
    """/proc refuses root, too."""
    done = slime("train", *tiny.argv(Path("/proc/nowhere"), **FLAGS), check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("slime: error: cannot write ")
    assert "/proc/nowhere" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_directory_of_somebody_else(tiny: TinyRun, tmp_path: Path, slime: Slime) -> None:
    tmp_path.chmod(0o500)
    try:
        done = slime("train", *tiny.argv(tmp_path / "run", **FLAGS), check=False)
    finally:
        tmp_path.chmod(0o700)
    assert done.returncode == 2
    assert "Permission denied" in done.stderr


@pytest.mark.slow
def test_data_that_change_between_commit_and_resume(tiny: TinyRun, tmp_path: Path, slime: Slime) -> None:
    data, run = tmp_path / "data.jsonl", tmp_path / "run"
    text = (tiny.root / "train.jsonl").read_text()
    data.write_text(text)
    argv = tiny.argv(run, **{**FLAGS, "prompt_data": data, "num_rollout": 1})
    slime("train", *argv)
    again = tiny.argv(run, **{**FLAGS, "prompt_data": data, "num_rollout": 2, "load": run})
    data.write_text(text.replace("1", "2", 1))
    changed = slime("train", *again, check=False)
    data.unlink()
    gone = slime("train", *again, check=False)
    data.write_text(text)
    slime("train", *again)
    assert (changed.returncode, gone.returncode) == (1, 2)
    assert f"--prompt-data {data} is not the data of the checkpoint" in changed.stderr
    assert "Restore the data, or start a new run" in changed.stderr
    assert f"--prompt-data {data}: no such file" in gone.stderr
