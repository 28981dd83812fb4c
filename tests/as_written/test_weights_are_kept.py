"""What people type who give no thought to checkpoints: nothing that was trained is lost or written over."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import SLIME, Slime, TinyRun

PLAIN = {"eval_interval": None, "eval_prompt_data": None, "lr_decay_style": None, "rollout_max_response_len": 4}


def argv_of(tiny: TinyRun, run_dir: Path, **flags: object) -> list[str]:
    """No `--save`, no `--save-interval`, no `--lr-decay-style`."""
    return tiny.argv(None, run_dir=run_dir, **{**PLAIN, "num_rollout": 2, **flags})


def commits(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("rollout_*"))


@pytest.fixture(scope="module")
def finished(tiny: TinyRun, slime: Slime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shortest command there is, done."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    slime("train", *argv_of(tiny, run_dir))
    return run_dir


def test_the_last_rollout_is_committed_and_a_finished_run_goes_on(
    tiny: TinyRun, finished: Path, tmp_path: Path, slime: Slime
) -> None:
    assert commits(finished) == ["rollout_0000001"]
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    more = slime("train", *argv_of(tiny, run_dir, num_rollout=3), "--load", run_dir)
    assert "2 of 3 rollouts done" in more.stdout
    assert commits(run_dir) == ["rollout_0000001", "rollout_0000002"]


@pytest.mark.slow
def test_records_of_another_run_are_not_written_over(
    tiny: TinyRun, finished: Path, tmp_path: Path, slime: Slime
) -> None:
    """`--load` says where to go on from; where to write is another matter."""
    used = tmp_path / "used"
    used.mkdir()
    (used / "metrics.jsonl").write_text('{"step": 1}\n')
    for load in (used, finished):
        refused = slime("train", *argv_of(tiny, used, load=load), check=False)
        assert refused.returncode == 2, refused.stderr
        assert "already holds a run (metrics.jsonl). No checkpoint is there to load: start over" in refused.stderr
        assert (used / "metrics.jsonl").read_text() == '{"step": 1}\n'
    refused = slime("train", *argv_of(tiny, tmp_path / "new"), "--save", finished, check=False)
    assert f"{finished} already holds a run (checkpoints). Continue it with --load {finished}" in refused.stderr
    checked = slime("check", *argv_of(tiny, used, load=used), check=False)
    assert "No checkpoint is there to load" in checked.stdout


@pytest.mark.slow
def test_a_second_command_takes_a_directory_of_its_own(tiny: TinyRun, tmp_path: Path) -> None:
    """Without --save and --run-dir, neither command is refused, and neither writes over the other's files."""
    command = [SLIME, "train", *tiny.argv(None, **{**PLAIN, "num_rollout": 1})]
    for directory in ("train", "train-2"):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=240)
        assert f"/outputs/{directory}/" in done.stdout.splitlines()[-1]
        moved = "outputs/train holds a run, so this one goes to outputs/train-2" in done.stderr
        assert moved == (directory == "train-2")
    assert commits(tmp_path / "outputs" / "train") == commits(tmp_path / "outputs" / "train-2") == ["rollout_0000000"]
