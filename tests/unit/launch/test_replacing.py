"""`--overwrite`: the earlier run stays until the new one has a record, and no file of the user's is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slime_commands.eval.generation import own_directory

from slime_core.checkpoint.store import CheckpointStore
from slime_core.errors import ConfigError, RecordError
from slime_core.files import HEADER
from slime_core.launch.journal import Journal
from slime_core.launch.lock import file_lock, finish_replacing, open_run_dir, settle_replaced

COMMIT = "checkpoints/rollout_0000001"
OLD = {
    "config.yaml": f"{HEADER}\nold: 1\n",
    "metrics.jsonl": '{"step": 1}\n',
    "summary.json": "{}",
    "samples/rollout_0000000.jsonl.zst": "old samples",
    "samples/.rollout_0000001.jsonl.zst.7.partial": "old samples",
    "weights/slime_weights.json": '{"run": "old"}',
    "checkpoints/ledger/0000001-abc.jsonl": "old ledger",
}
USERS = {
    "notes.txt": "mine",
    "inputs/train.jsonl": "mine",
    "samples/labelled.csv": "mine",
    "checkpoints/README.md": "mine",
    f"{COMMIT}/model_card.md": "mine",
}
NEW = {"config.yaml": f"{HEADER}\nnew: 1\n", "samples/rollout_0000000.jsonl.zst": "new samples"}


def settings(run_dir: Path, save: Path | None = None, **changes: Any) -> Any:
    given = {"overwrite": True, "load": None, "start_rollout_id": None, **changes}
    return SimpleNamespace(run_dir=str(run_dir), save=save and str(save), **given)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def a_run(root: Path) -> Path:
    """A finished run with files of the user's among its own."""

    def model(directory: Path) -> None:
        (directory / "model.safetensors").write_text("old weights")

    write(root, OLD)
    CheckpointStore(root / "checkpoints").commit(1, {}, [model])
    write(root, USERS)
    return root


def files(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file() and p.name != ".lock"}


class Killed(BaseException):
    """In the place of SIGKILL: nothing catches it."""


def killed_after(steps: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> bool:
    """Do the work with an end after so many changes to the disk; whether it came to its end."""
    left = [steps]

    def counted(do: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return do(*args, **kwargs)

        return counting

    with monkeypatch.context() as patch:
        for name in ("rename", "mkdir", "rmdir", "unlink", "replace"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        try:
            work()
        except Killed:
            return False
        return True


def places(tmp_path: Path, apart: bool) -> tuple[Path, Path | None]:
    """A run, whose commits are in a directory of their own where `apart`."""
    run = a_run(tmp_path / "run")
    if not apart:
        return run, None
    (tmp_path / "save").mkdir()
    os.rename(run / "checkpoints", tmp_path / "save" / "checkpoints")
    (tmp_path / "save" / "checkpoints" / "latest").write_text("rollout_0000001")
    return run, tmp_path / "save"


@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_kill_at_any_moment_before_the_first_record_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    for steps in range(60):
        root = tmp_path / str(steps)
        root.mkdir()
        run, save = places(root, apart)
        args, before = settings(run, save), files(root)

        def begin_and_fail(args: Any = args, run: Path = run) -> None:
            open_run_dir(args, resume=False)
            write(run, NEW)
            settle_replaced(args)

        ended = killed_after(steps, monkeypatch, begin_and_fail)
        settle_replaced(args)
        assert files(root) == before, steps
        if ended:
            return
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_kill_at_any_moment_after_the_first_record_keeps_the_new_run_and_the_users_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    recorded = NEW | {"metrics.jsonl": '{"step": 0}\n'}
    kept_there = {name for name in USERS if name.startswith(("samples", "checkpoints"))}
    for steps in range(60):
        root = tmp_path / str(steps)
        root.mkdir()
        run, save = places(root, apart)
        args = settings(run, save)
        open_run_dir(args, resume=False)
        write(run, recorded)
        ended = killed_after(steps, monkeypatch, lambda args=args: settle_replaced(args))  # type: ignore[misc]
        settle_replaced(args)
        found = files(root)
        assert {name.removeprefix("run/"): text for name, text in found.items() if text != "mine"} == recorded
        mine = sorted(name for name, text in found.items() if text == "mine")
        assert len(mine) == len(USERS), (steps, mine)
        assert {"run/notes.txt", "run/inputs/train.jsonl"} < {*mine}
        assert sum("kept" in name for name in mine) == len(kept_there)
        if ended:
            return
    raise AssertionError("it never came to its end")


def test_a_resumed_run_deletes_what_a_kill_left_of_its_files(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    left = {".metrics.jsonl.7.partial": "", "weights/.weight-check-7.partial/config.json": ""}
    write(run, left)
    before = files(run)
    open_run_dir(settings(run, overwrite=False, load=str(run)), resume=True)
    assert before.keys() - files(run).keys() == {*left, "samples/.rollout_0000001.jsonl.zst.7.partial", "summary.json"}


def test_the_next_command_finishes_what_a_kill_left(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    before, args = files(run), settings(run)
    open_run_dir(args, resume=False)
    write(run, NEW)
    finish_replacing(args)
    assert files(run) == before
    finish_replacing(settings(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("record", ["metrics.jsonl", "eval.json", "eval/h.jsonl", "rollouts/rollout_0000000.jsonl"])
def test_each_kind_of_record_counts(tmp_path: Path, record: str) -> None:
    run = a_run(tmp_path / "run")
    args = settings(run)
    open_run_dir(args, resume=False)
    write(run, NEW | {record: "{}\n"})
    settle_replaced(args)
    assert files(run)["config.yaml"] == NEW["config.yaml"]
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize(
    "project",
    [
        {"config.yaml": "mine: true\n"},
        {"config.yaml": "mine: true\n", "samples/a.wav": "mine"},
        {"samples/a.wav": "mine"},
        {"checkpoints/mine.bin": "mine"},
        {"metrics.jsonl": "mine"},
        {"summary.json": json.dumps({"mine": 1})},
    ],
)
def test_a_directory_that_is_no_run_is_not_overwritten(tmp_path: Path, project: dict[str, str]) -> None:
    write(tmp_path, project)
    with pytest.raises(ConfigError, match="slime cannot tell that a run made this"):
        open_run_dir(settings(tmp_path), resume=False)
    assert files(tmp_path) == project


@pytest.mark.parametrize("name", ["hf_checkpoint", "ref_load", "prompt_data", "load"])
def test_a_run_does_not_replace_what_it_reads(tmp_path: Path, name: str) -> None:
    run = a_run(tmp_path / "run")
    before = files(run)
    with pytest.raises(ConfigError, match="is part of the run that --overwrite would replace"):
        open_run_dir(settings(run, **{name: str(run / COMMIT)}), resume=False)
    assert files(run) == before


def test_samples_that_are_there_are_not_written_over(tmp_path: Path) -> None:
    write(tmp_path, {"dump/0.jsonl": "mine"})
    template = str(tmp_path / "dump" / "{rollout_id}.jsonl")
    args = settings(tmp_path / "run", overwrite=False, save_debug_rollout_data=template)
    with pytest.raises(ConfigError, match=r"0\.jsonl is there already"):
        open_run_dir(args, resume=False)


def test_the_best_commit_by_each_evaluation_is_spared(tmp_path: Path) -> None:
    args = SimpleNamespace(
        save=None, keep_checkpoints=2, overwrite=False, eval_datasets=[SimpleNamespace(name=n) for n in ("a", "b")]
    )
    hooks = SimpleNamespace(slime_log_metrics=lambda step, metrics: None)
    journal = Journal(args, tmp_path, hooks, [], dict, [], 0.0)
    assert journal.best(0) == set()
    for rollout_id, scores in enumerate(((0.1, 0.9), (0.8, 0.2), (0.9, 0.1), (0.8, 0.3))):
        journal.log(rollout_id + 1, dict(zip(("eval/a", "eval/b"), scores)))
    for rollout_id in (0, 1, 3):  # the best by a has no commit
        (tmp_path / "checkpoints" / f"rollout_{rollout_id:07d}").mkdir(parents=True)
    assert journal.best() == {0, 3}
    assert journal.best(2) == {0, 2}
    again = Journal(args, tmp_path, hooks, [], dict, [], 0.0)
    state = {"evals": {}, "seconds": 1.0, "scores": json.loads(json.dumps(journal.scores))}
    again.restore(tmp_path, state)
    assert again.best() == {0, 3}


def test_a_run_directory_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    hooks = SimpleNamespace(slime_log_metrics=lambda step, metrics: None)
    args = SimpleNamespace(save=None, overwrite=False, eval_datasets=[])
    run = tmp_path / "run"
    run.mkdir()
    journal = Journal(args, run, hooks, [], dict, [], 0.0)
    journal.log(1, {"x": 1.0})
    run.rename(tmp_path / "moved")
    with pytest.raises(RecordError, match="has been moved or removed while the run wrote to it"):
        journal.log(2, {"x": 1.0})
    assert not run.exists()


@pytest.mark.parametrize("held", ["metrics.jsonl", "checkpoints"])
def test_an_evaluation_writes_nothing_into_a_training_run(tmp_path: Path, held: str) -> None:
    run = tmp_path / "run"
    (run / held).mkdir(parents=True)
    args = settings(run, user_code_timeout=1.0)
    with pytest.raises(ConfigError, match="holds a training run"), own_directory(args, "eval"):
        raise AssertionError("it was let in")
    assert [path.name for path in run.iterdir()] == [held]
    (run / held).rmdir()
    with own_directory(args, "eval"):
        assert (run / ".lock").exists()


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.raises(ConfigError, match=r"\.lock cannot be locked: .* not implemented; choose another file system"),
        file_lock(tmp_path / ".lock", deadline=0.0, refusal="no"),
    ):
        pass
