"""Checkpoint commits: atomic, verified, refused when torn or foreign."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from slime_core.checkpoint import store as module
from slime_core.checkpoint.store import LATEST, MANIFEST, CheckpointStore, find, read_state, rollout_of
from slime_core.errors import CheckpointError


def _write(text: str):
    def write(directory: Path) -> None:
        (directory / "trainer").mkdir(exist_ok=True)
        (directory / "trainer" / "weights").write_text(text)

    return write


def test_commit_is_found_with_its_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.commit(4, {"weight_version": 6}, [_write("a")])
    assert store.latest() == path == find(tmp_path) == find(path)
    assert read_state(path) == {"rollout_id": 4, "weight_version": 6}
    assert (store.root / LATEST).read_text().strip() == "rollout_0000004"


@pytest.mark.parametrize(("keep", "kept"), [(2, [1, 4, 5]), (1, [1, 5]), (0, [*range(6)]), (9, [*range(6)])])
def test_spared_commits_stay(tmp_path: Path, keep: int, kept: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(tmp_path)
    for rollout_id in range(6):
        store.commit(rollout_id, {}, [_write(str(rollout_id))], keep=keep, spared={1})
    assert [rollout_of(path) for path in store.commits()] == kept
    said = capsys.readouterr().out
    assert said.count("--keep-checkpoints 0 keeps all") == (len(kept) < 6)  # once


def test_files_that_others_put_into_a_commit_outlive_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for rollout_id in range(3):
        commit = store.commit(rollout_id, {}, [_write("a")], keep=1)
        (commit / "README.md").write_text(f"mine {rollout_id}")
        (commit / "trainer" / "notes").write_text("mine")
    assert [path.name for path in store.commits()] == ["rollout_0000002"]
    kept = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("kept-*/**/*") if p.is_file())
    assert kept == [f"kept-rollout_000000{n}/{name}" for n in (0, 1) for name in ("README.md", "trainer/notes")]
    find(tmp_path)
    store.rewind(store.commits()[0])
    assert len(list(tmp_path.glob("kept-*"))) == 2


def test_a_commit_and_its_half_deleted_namesake_are_both_rewound(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for rollout_id in range(2):
        store.commit(rollout_id, {}, [_write("a")])
    (tmp_path / ".partial-rollout_0000001").mkdir()
    store.rewind(store.commits()[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "rollout_0000000"]


def test_a_full_disk_and_a_missing_directory_have_different_hints(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    for error, hint in ((OSError(28, "No space left"), True), (FileNotFoundError(2, "No such file"), False)):

        def fails(directory: Path, error: OSError = error) -> None:
            raise error

        with pytest.raises(CheckpointError) as caught:
            store.commit(0, {}, [fails])
        assert ("make space" in str(caught.value)) == hint
        assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_torn_commit_is_refused_with_the_reason(tmp_path: Path, damage: str) -> None:
    path = CheckpointStore(tmp_path).commit(0, {}, [_write("abcdef")])
    victim = path / "trainer" / "weights"
    if damage == "truncate":
        victim.write_text("abc")
    elif damage == "flip":
        victim.write_text("abcdeF")
    elif damage == "remove":
        victim.unlink()
    else:
        (path / MANIFEST).write_text('{"format": ')
    with pytest.raises(CheckpointError, match="torn"):
        find(tmp_path)


def test_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rollout_0000003").mkdir()
    with pytest.raises(CheckpointError, match="not a slime checkpoint"):
        find(tmp_path)
    path = CheckpointStore(tmp_path / "other").commit(0, {}, [])
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "format": "theirs-7"}))
    with pytest.raises(CheckpointError, match="theirs-7"):
        find(path)


class Killed(BaseException):
    """Stands for the kernel taking the process away."""


@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("call", range(14))
def test_killed_at_any_call_leaves_the_old_or_the_new_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, number: int
) -> None:
    """A commit with a new number, or made again; the next run clears up what is left of it."""
    store = CheckpointStore(tmp_path)
    store.commit(3, {}, [_write("first")])
    store.commit(4, {}, [_write("old")])
    left = [call]

    def dying(function):
        def wrapper(*args, **kwargs):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "fsync", "rmdir"):
            patch.setattr(module.os, name, dying(getattr(os, name)))
        with contextlib.suppress(Killed):
            store.commit(number, {}, [_write("new")])
    found = CheckpointStore(tmp_path).latest()
    assert found is not None
    new = "rollout_0000005" if number == 5 else "rollout_0000004.01"
    assert (found / "trainer" / "weights").read_text() == ("new" if found.name == new else "old")
    store.rewind(found)
    older = {"rollout_0000003"} | ({"rollout_0000004"} if number == 5 else set())
    assert {p.name for p in tmp_path.iterdir()} - {f".{LATEST}.partial"} == {*older, found.name, LATEST}
    names = [store.commit(6, {}, [_write("again")]).name for _ in range(3)]
    assert names == ["rollout_0000006", "rollout_0000006.01", "rollout_0000006.02"]
    assert store.commits()[-2:] == [found, tmp_path / "rollout_0000006.02"]


def test_rewind_forgets_later_commits_and_deletes_those_that_a_killed_run_left(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    paths = [store.commit(i, {}, [_write(str(i))]) for i in range(3)]
    store.rewind(paths[2], keep=2)
    assert store.commits() == paths[1:]
    store.rewind(paths[1])
    assert store.commits() == [store.latest()] == [paths[1]]


def test_file_system_errors_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot save to"):
        CheckpointStore(tmp_path / "file" / "checkpoints").commit(0, {}, [])
