"""Commits of the generation side: resumed, rewound, pruned, moved, in another mode, and from before ledgers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest
from slime_runs.history import read_history, replay

from slime_core.data.ledger_files import LEDGER_FILE, SEGMENTS
from slime_core.errors import CheckpointError, RolloutError
from slime_core.rollout.state import OPEN_GROUPS_FILE, OpenGroup
from slime_core.sample import Group, Sample
from tests.unit.checkpoint.ledger_run import BATCH, LedgerRun, check


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


def test_random_kills_resumes_and_rewinds_always_verify(tmp_path: Path, tokenizer: Any) -> None:
    """Whatever happens between commits, every commit's ledger holds."""
    seed = int(os.environ.get("LEDGER_SEED", random.SystemRandom().randrange(10**6)))
    print(f"LEDGER_SEED={seed}")
    rng = random.Random(seed)
    run, done = LedgerRun(tmp_path, tokenizer), 0
    for _ in range(12):
        for _ in range(rng.randint(1, 3)):
            run.stage.update_weights("tensor", [], done + 1)
            run.stage.generate_groups(done)
            done += 1
            if rng.random() < 0.5:
                commit = run.commit(done - 1, keep=rng.choice([None, 2]))
                assert check(commit).problems == []
        commits = run.store.commits()
        run = LedgerRun(tmp_path, tokenizer)
        if not commits:
            done = 0
            continue
        commit = rng.choice(commits)
        run.resume(commit)
        done = int(commit.name[-7:]) + 1
        assert check(commit).problems == []


def test_rewinding_forgets_segments_and_pruning_does_not(tmp_path: Path, tokenizer: Any) -> None:
    run = LedgerRun(tmp_path, tokenizer)
    run.go(range(4), keep=2)
    assert len(run.store.commits()) == 2
    assert len(_segments(run)) == 4
    again = LedgerRun(tmp_path, tokenizer)
    commit = run.store.commits()[0]
    again.resume(commit)
    assert len(_segments(again)) == 3
    assert check(again.go(range(3, 4))).problems == []


def test_a_run_goes_on_in_another_directory(tmp_path: Path, tokenizer: Any) -> None:
    old = LedgerRun(tmp_path, tokenizer)
    commit = old.go(range(3))
    new = LedgerRun(tmp_path, tokenizer)
    new.store.root = tmp_path / "elsewhere"
    new.resume(commit)
    report = check(new.go(range(3, 5)))
    assert report.problems == []
    assert (report.facts["rollouts"], report.facts["segments"]) == (5, 5)
    assert check(commit).problems == []


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


def test_a_commit_without_its_store_starts_one(tmp_path: Path, tokenizer: Any) -> None:
    commit = LedgerRun(tmp_path, tokenizer).go(range(2))
    moved = commit.rename(tmp_path / commit.name)
    run = LedgerRun(tmp_path, tokenizer)
    run.store.root = tmp_path / "elsewhere"
    assert "the commit's ledger is not in" in run.resume(moved)
    assert check(run.go(range(2, 4))).problems == []


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


def test_groups_taken_ahead_come_back_to_their_owner(tmp_path: Path, tokenizer: Any) -> None:
    _, commit, taken = _with_a_rollout_ahead(tmp_path, tokenizer)
    report = check(commit)
    assert (report.problems, report.facts["trained"]) == ([], 2 * BATCH)
    assert report.facts["open"]["taken"] == BATCH
    lines = [orjson.loads(line) for line in (commit / OPEN_GROUPS_FILE).read_bytes().splitlines()]
    assert [(line["owner"], line["rollout_id"], line["state"]) for line in lines] == [("ahead", 2, "taken")] * BATCH
    again, owner = LedgerRun(tmp_path, tokenizer), Ahead([])
    assert "3 ready to be trained on" in again.resume(commit)
    again.stage.open_groups.register("ahead", owner)
    assert [g.samples for g in owner.groups] == taken
    again.stage.start()
    owner.groups = []
    final = again.commit(2)
    assert (check(final).problems, check(final).facts["trained"]) == ([], 3 * BATCH)


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


def test_an_open_group_that_nobody_stores_is_found(tmp_path: Path, tokenizer: Any) -> None:
    run, _, taken = _with_a_rollout_ahead(tmp_path, tokenizer)
    run.stage.open_groups._owner[1].groups.pop()  # type: ignore
    (problem,) = check(run.commit(1)).problems
    assert (
        problem == f"group {taken[-1][0].group_index} is taken for rollout 3, but the commit does not hold its samples"
    )


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


def test_a_source_that_saves_itself_is_taken_at_its_word(tmp_path: Path) -> None:
    class Own:
        def __init__(self) -> None:
            self.next, self.saved = 0, []

        def get_samples(self, num_samples: int) -> list[Group]:
            numbers = range(self.next, self.next + num_samples)
            self.next += num_samples
            return [[Sample(group_index=i, index=i, tokens=[1])] for i in numbers]

        def add_samples(self, samples: list[Group]) -> None:
            pass

        def save(self, rollout_id: int) -> None:
            self.saved.append(rollout_id)

        def load(self, rollout_id: int | None = None) -> None:
            self.saved.append(-1 if rollout_id is None else rollout_id)

    run = LedgerRun(tmp_path, None, Own())
    report = check(run.go(range(2)))
    assert report.problems == []
    assert len(report.notes) == 2
    assert run.stage.parts.data_source.saved == [0, 1]


def test_what_the_disk_refuses_is_kept_for_the_next_commit(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LedgerRun(tmp_path, tokenizer)
    run.go(range(1))
    run.stage.generate_groups(1)

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("slime_core.rollout.state.write_segment", full)
        with pytest.raises(CheckpointError, match="No space left"):
            run.commit(1)
    assert check(run.commit(1)).problems == []


def test_a_state_that_json_cannot_hold_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    run = LedgerRun(tmp_path, tokenizer)
    run.stage.generate_groups(0)
    run.stage.open_groups.register("ahead", Ahead([OpenGroup([Sample(group_index=0)], details={"what": object()})]))
    with pytest.raises(RolloutError, match="group 0 cannot be saved"):
        run.commit(0)
