"""Commits of the generation side: after a kill, without a ledger, and of groups whose owner or buffer lost them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from slime_runs.history import read_history, replay

from slime_core.data.ledger_files import LEDGER_FILE, SEGMENTS
from slime_core.errors import CheckpointError, RolloutError
from slime_core.rollout.state import OpenGroup
from slime_core.sample import Group, Sample
from tests.unit.checkpoint.ledger_run import LedgerRun, check


def _files(commit: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in commit.iterdir() if path.is_file()}


def _segments(run: LedgerRun) -> list[str]:
    return sorted(p.name for p in (run.store.root / SEGMENTS).iterdir())


def test_a_killed_run_goes_on_to_the_same_ledger(tmp_path: Path, tokenizer: Any) -> None:
    whole = LedgerRun(tmp_path / "whole", tokenizer, **_mkdir(tmp_path / "whole"))
    expected = whole.go(range(6))
    run = LedgerRun(tmp_path / "run", tokenizer, **_mkdir(tmp_path / "run"))
    commit = run.go(range(3))
    run.stage.generate_groups(3)  # and killed before it was committed, or just when its segment was written
    with pytest.raises(CheckpointError, match="killed"):
        run.store.commit(3, {}, [lambda d: run.stage.save(d, 3), _kill])
    again = LedgerRun(tmp_path / "run", tokenizer)
    assert again.resume(commit) == "2 open groups (2 buffered)"
    final = again.go(range(3, 6))
    assert _segments(again) == _segments(whole)
    assert _files(final)[LEDGER_FILE] == _files(expected)[LEDGER_FILE]
    assert check(final).problems == []
    assert check(final).facts == check(expected).facts


def _mkdir(path: Path) -> dict[str, Any]:
    path.mkdir()
    return {}


def _kill(directory: Path) -> None:
    raise OSError("killed")


def test_a_commit_without_ledger_starts_one(tmp_path: Path, tokenizer: Any) -> None:
    commit = LedgerRun(tmp_path, tokenizer).go(range(2))
    (commit / LEDGER_FILE).unlink()
    run = LedgerRun(tmp_path, tokenizer)
    said = run.resume(commit)
    assert said == "1 open group (1 buffered) (the commit has no ledger: a new one begins here)"
    report = check(run.go(range(2, 5)))
    assert report.problems == []
    assert "begins at rollout 3 (the commit has no ledger)" in report.notes[0]
    with pytest.raises(CheckpointError, match="made by a version without one"):
        read_history(commit)


class Ahead:
    """Has the next rollout's groups ready."""

    def __init__(self, groups: list[OpenGroup]) -> None:
        self.groups = groups

    def open_groups(self) -> Iterable[OpenGroup]:
        return self.groups

    def restore_open_groups(self, groups: list[OpenGroup]) -> None:
        self.groups = groups


def _with_a_rollout_ahead(root: Path, tokenizer: Any) -> tuple[LedgerRun, Path, list[Group]]:
    run = LedgerRun(root, tokenizer)
    run.go(range(1))
    run.stage.generate_groups(1)
    taken, _ = run.stage.generate_groups(2)
    run.stage.open_groups.register("ahead", Ahead([OpenGroup(g, 2) for g in taken]))
    return run, run.commit(1), taken


def test_groups_whose_owner_is_gone_wait_in_the_buffer(tmp_path: Path, tokenizer: Any) -> None:
    _, commit, taken = _with_a_rollout_ahead(tmp_path, tokenizer)
    again = LedgerRun(tmp_path, tokenizer)
    again.resume(commit)
    again.stage.start()
    indices = {g[0].group_index for g in taken}
    states = {entry["group"]: entry["state"] for entry in again.stage.ledger.snapshot().open}
    assert all(states[i] == "buffered" for i in indices if i is not None)
    final = again.go(range(2, 5))
    assert check(final).problems == []
    records = replay(read_history(final)).groups
    assert all(len(records[i].trained) == 1 for i in indices if i is not None)


def test_a_buffer_that_loses_groups_has_to_say_so(tmp_path: Path, tokenizer: Any) -> None:
    run = LedgerRun(tmp_path, tokenizer)
    run.go(range(1))
    plugin = run.stage.parts.data_source.buffer._plugin
    plugin._waiting.clear()
    problems = check(run.commit(0)).problems
    assert problems
    assert all("does not declare that it drops groups" in line for line in problems)
    lost = LedgerRun(tmp_path / "other", tokenizer, **_mkdir(tmp_path / "other"))
    lost.go(range(1))
    plugin = lost.stage.parts.data_source.buffer._plugin
    plugin._waiting.clear()
    plugin.drops = True
    report = check(lost.commit(0))
    assert report.problems == []
    assert report.facts["dropped"] == {"removed by the buffer": len(problems)}


def test_a_state_that_json_cannot_hold_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    run = LedgerRun(tmp_path, tokenizer)
    run.stage.generate_groups(0)
    run.stage.open_groups.register("ahead", Ahead([OpenGroup([Sample(group_index=0)], details={"what": object()})]))
    with pytest.raises(RolloutError, match="group 0 cannot be saved"):
        run.commit(0)
