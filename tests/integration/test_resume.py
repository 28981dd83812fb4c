"""A run that is killed and resumed ends bitwise as one that is not, and says what it does."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.backends.whole_runs import hold
from tests.conftest import SLIME, TinyRun
from tests.run_files import last_commit, timeless

ROLLOUTS = 6
FLAGS = {"num_rollout": ROLLOUTS, "over_sampling_batch_size": 6, "partial_rollout": True, "save_interval": 2}


@pytest.fixture(scope="module")
def unkilled(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("unkilled") / "run"
    slime("train", *tiny.argv(save, **FLAGS))
    return save


def _killed(argv: list[str], lines: int, seconds: float = 0.0, held: Path | None = None) -> bool:
    """Start the run and SIGKILL it `seconds` after its `lines`-th progress line; False when it ended before.

    Args:
        held: Directory for `hold`. The run does not get to its end, however late this process comes to kill it.
    """
    if held is not None:
        argv = [*argv, "--custom-rollout-log-function-path", str(hold(held, ROLLOUTS - 1))]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for line in process.stdout if lines else ():
        lines -= line.startswith("rollout ")
        if lines == 0:
            break
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    process.stdout.close()
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("buffer", ["replay", "curriculum"])
@pytest.mark.slow
def test_killed_with_a_buffer_that_has_a_state_of_its_own(tiny: TinyRun, tmp_path: Path, buffer: str) -> None:
    """Over-sampling leaves partial and finished groups; the data are few, so their pass rates soon matter."""
    flags = {
        **FLAGS, "buffer_filter_path": buffer, "prompt_data": f"{tiny.root / 'train.jsonl'}@[0:8]",
        "use_rollout_logprobs": True, "eval_interval": None, "eval_prompt_data": None, "num_rollout": ROLLOUTS,
        "set": "plugins.replay.max_uses=2" if buffer == "replay" else "plugins.curriculum.pass_reward=0.3",
    }  # fmt: skip
    whole, save = tmp_path / "whole", tmp_path / "run"
    subprocess.run([SLIME, "train", *tiny.argv(whole, **flags)], check=True, timeout=120, capture_output=True)
    shown = timeless(whole)
    assert all(line["rollout/buffer/waiting_groups"] >= 0 for line in shown)
    if buffer == "replay":
        assert [line["rollout/replayed_groups"] for line in shown] == [0] + [1] * (ROLLOUTS - 1)
    else:
        assert sum(line["rollout/curriculum/skipped_hard"] for line in shown) > 0
    argv = [SLIME, "train", *tiny.argv(save, **flags, load=save)]
    assert _killed(argv, 3, held=tmp_path)
    subprocess.run(argv, check=True, timeout=120, capture_output=True)
    assert timeless(save) == shown
    assert last_commit(save, ()) == last_commit(whole, ())


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [2, 4])
def test_resume_from_each_commit(tiny: TinyRun, unkilled: Path, tmp_path: Path, slime: Any, stop_after: int) -> None:
    """As if killed right after that commit, with everything later lost."""
    save = tmp_path / "run"
    shutil.copytree(unkilled, save)
    commit = save / "checkpoints" / f"rollout_{stop_after - 1:07d}"
    done = slime("train", *tiny.argv(save, **FLAGS, load=commit))
    assert f"{stop_after} of {ROLLOUTS} rollouts done" in done.stdout
    assert timeless(save) == timeless(unkilled)
    assert last_commit(save, ()) == last_commit(unkilled, ())


def test_torn_and_foreign_checkpoints_are_refused(tiny: TinyRun, unkilled: Path, tmp_path: Path, refused) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(unkilled, torn)
    commit = torn / "checkpoints" / f"rollout_{ROLLOUTS - 1:07d}"
    weights = commit / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "torn: model.safetensors" in refused("train", *tiny.argv(torn, **FLAGS, load=torn), status=1)
    argv = tiny.argv(tmp_path / "new", **FLAGS, load=tmp_path / "nowhere")
    assert "no slime checkpoint there" in refused("train", *argv, status=1)


def test_a_used_run_directory_is_not_overwritten_by_accident(tiny: TinyRun, unkilled: Path, refused) -> None:
    before = last_commit(unkilled, ())
    said = refused("train", *tiny.argv(unkilled, **FLAGS))
    assert "already holds a run" in said
    assert "--overwrite" in said
    assert last_commit(unkilled, ()) == before


def test_a_command_killed_before_its_first_record_starts_again(tiny: TinyRun, tmp_path: Path, slime: Any) -> None:
    """Of servers and actors there is output before there is a record."""
    save = tmp_path / "run"
    (save / "actors").mkdir(parents=True)
    (save / "actors" / "trainer-0.log").write_text("")
    flags = {"num_rollout": 1, "eval_interval": None, "eval_prompt_data": None}
    slime("train", *tiny.argv(save, **flags, load=save))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}")
    refused = slime("train", *tiny.argv(tmp_path / "other", **flags, load=tmp_path / "other"), check=False)
    assert "already holds a run (metrics.jsonl)" in refused.stderr


@pytest.mark.slow
def test_changed_settings_are_said_on_resume(tiny: TinyRun, unkilled: Path, tmp_path: Path, slime) -> None:
    save = tmp_path / "run"
    shutil.copytree(unkilled, save)
    flags = {**FLAGS, "lr": "5e-4", "num_rollout": ROLLOUTS + 1, "load": save}
    refused = slime("train", *tiny.argv(save, **flags), check=False)
    assert "lr 0.003 then, 0.0005 now; add --override-opt-param-scheduler" in refused.stderr
    done = slime("train", *tiny.argv(save, **flags, override_opt_param_scheduler=True))
    assert "lr 0.003 -> 0.0005" in done.stdout
    assert (save / "checkpoints" / f"rollout_{ROLLOUTS:07d}").is_dir()


def test_a_refused_resume_deletes_nothing(tiny: TinyRun, unkilled: Path, tmp_path: Path, refused: Any) -> None:
    """From an older commit: the later ones go once the run goes on from it, and not before."""
    save = tmp_path / "run"
    shutil.copytree(unkilled, save)
    kept = {path: path.stat().st_mtime_ns for path in (save / "checkpoints").rglob("*")}
    metrics = (save / "metrics.jsonl").read_text()
    said = refused("train", *tiny.argv(save, **FLAGS, load=save, ckpt_step=1, rollout_seed=7), status=1)
    assert "so its cursor is void: --rollout-seed was" in said
    assert {path: path.stat().st_mtime_ns for path in (save / "checkpoints").rglob("*")} == kept
    assert (save / "metrics.jsonl").read_text() == metrics


def test_load_takes_an_hf_directory(tiny: TinyRun, unkilled: Path, tmp_path: Path, slime) -> None:
    from safetensors.torch import load_file

    source = tmp_path / "weights"
    source.mkdir()
    trained = unkilled / "checkpoints" / f"rollout_{ROLLOUTS - 1:07d}"
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trained / name, source / name)
    flags = {"num_rollout": 1, "load": source, "lr": 0.0, "eval_interval": None, "eval_prompt_data": None}
    done = slime("train", *tiny.argv(tmp_path / "run", **flags))
    assert f"weights of {source}" in done.stdout
    after = load_file(tmp_path / "run" / "checkpoints" / "rollout_0000000" / "model.safetensors")
    before = load_file(source / "model.safetensors")
    assert all((after[name] == before[name]).all() for name in before)


@pytest.mark.slow
def test_two_runs_do_not_write_into_one_directory(tiny: TinyRun, tmp_path: Path, slime) -> None:
    save = tmp_path / "run"
    argv = [SLIME, "train", *tiny.argv(save, **{**FLAGS, "num_rollout": 500}, overwrite=True)]
    first = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert first.stdout is not None
    try:
        assert any(line.startswith("rollout ") for line in first.stdout)
        done = slime("train", *tiny.argv(save, **FLAGS, overwrite=True), check=False)
        assert done.returncode == 2
        assert "another run is writing here" in done.stderr
        assert f"held by process {first.pid}: " in done.stderr
    finally:
        first.kill()
        first.stdout.close()
        first.wait()
    slime("train", *tiny.argv(save, **{**FLAGS, "num_rollout": 1}, overwrite=True))  # the lock died with its holder
