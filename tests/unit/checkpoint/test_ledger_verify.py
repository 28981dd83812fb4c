"""Verification: a real ledger holds, and every single corruption of one is found and named."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from slime_runs.history import read_history, replay
from slime_runs.inspect.ledger_verify import summary, verify

from slime_core.data.ledger_files import SEGMENTS
from slime_core.errors import CheckpointError
from slime_core.sample import Sample
from tests.unit.checkpoint.ledger_run import LedgerRun, check, rewrite

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return LedgerRun(tmp_path_factory.mktemp("made"), tokenizer).go(range(4))


@pytest.fixture
def commit(tmp_path: Path, made: Path) -> Path:
    """Four rollouts of three groups: groups 3 and 10 are dropped, row 4 is too long, group 14 waits."""
    shutil.copytree(made.parent, tmp_path / "checkpoints")
    return tmp_path / "checkpoints" / made.name


def test_a_real_ledger_holds(commit: Path) -> None:
    report = check(commit)
    assert report.problems == []
    assert report.notes == []
    facts = report.facts
    assert (facts["groups"], facts["trained"], facts["dropped"]) == (15, 12, {"too easy": 2})
    assert (facts["open"], facts["rows_skipped"]) == ({"buffered": 1}, {"too long": 2})
    assert (facts["rows"], facts["epochs_finished"], facts["segments"]) == (17, 1, 4)
    assert "12 trained on once in 4 rollouts" in summary(report)
    for rollout in range(4):
        assert check(commit.parent / f"rollout_{rollout:07d}").problems == []


def _of(events: Events, kind: str, **values: Any) -> dict[str, Any]:
    return next(e for e in events if e["event"] == kind and all(e.get(k) == v for k, v in values.items()))


def _without(events: Events, kind: str, **values: Any) -> None:
    events.remove(_of(events, kind, **values))


def _waiting(state: dict[str, Any]) -> list[Any]:
    return state["data_source"]["buffer"]["state"]["groups"]


def _twice(events: Events, found: Any, state: Any) -> None:
    events.append({"event": "drawn", "group": 0, "samples": [0, 1]})
    events += [{**_of(events, kind, group=0), "rollout": 3} for kind in ("taken", "trained")]
    _of(events, "rollout", rollout=3)["groups"] += 1


def _forget_group(events: Events, found: Any, state: Any) -> None:
    events[:] = [e for e in events if e.get("group") != 3]  # dropped: of no rollout


def _after(kind: str, group: int) -> Callable[..., None]:
    """One more event of a kind for a group whose story has ended."""

    def edit(events: Events, found: Any, state: Any) -> None:
        events.append({"event": kind, "group": group, "reason": "again", "samples": []})

    return edit


def _steal_sample(events: Events, found: Any, state: Any) -> None:
    _of(events, "drawn", group=6)["samples"][0] = 2


def _draw_beyond(events: Events, found: Any, state: Any) -> None:
    found["cursor"]["next_group_index"] -= 1


def _drop_row(events: Events, found: Any, state: Any) -> None:
    _without(events, "skipped")


def _repeat_row(events: Events, found: Any, state: Any) -> None:
    _of(events, "drawn", group=5)["row"] = 0


def _later_row(events: Events, found: Any, state: Any) -> None:
    events.append({"event": "skipped", "row": 1, "epoch": 9, "reason": "too long"})


def _store_trained(events: Events, found: Any, state: Any) -> None:
    group = copy.deepcopy(_waiting(state)[0])
    for sample in group:
        sample["group_index"] = 0
    _waiting(state).append(group)


def _store_unknown(events: Events, found: Any, state: Any) -> None:
    _waiting(state).append([Sample(group_index=77).to_dict()])


CORRUPTIONS: dict[str, tuple[Callable[..., None], str]] = {
    "trained twice": (_twice, "group 0 was trained on 2 times (rollouts 1, 4); allowed: once"),
    "drawn again": (_twice, "group 0 was drawn again, though it is trained at rollout 1"),
    "no event at all": (_forget_group, "groups 3 were numbered by the data source and never recorded as drawn"),
    "drawn after the end": (_after("drawn", 3), "group 3 was drawn after it was dropped (too easy)"),
    "scored after the end": (_after("scored", 0), "group 0 is recorded as scored, though it is trained at rollout 1"),
    "dropped after the end": (_after("dropped", 0), "group 0 was dropped (again), though it is trained at rollout 1"),
    "trained after it was dropped": (
        lambda e, f, s: e.append({"event": "taken", "group": 3, "rollout": 3, "version": 4}),
        "group 3 was taken for rollout 4 after it was dropped (too easy)",
    ),
    "not terminal": (
        lambda e, f, s: _without(e, "dropped", group=3),
        "group 3 is scored by its events, but the commit does not list it as open",
    ),
    "open, and ended": (
        lambda e, f, s: f["open"].append({"group": 0, "state": "buffered"}),
        "group 0 is buffered in the commit, but by its events it is trained at rollout 1",
    ),
    "open group not stored": (
        lambda e, f, s: _waiting(s).pop(),
        "group 14 is buffered, but the commit does not hold its samples",
    ),
    "stored and trained": (_store_trained, "group 0 waits in the commit, though it is trained at rollout 1"),
    "stored and unknown": (_store_unknown, "group 77 waits in the commit and was never recorded"),
    "drawn while out": (_after("drawn", 14), "group 14 is drawn by its events"),
    "two at once": (
        lambda e, f, s: e.extend(
            [{"event": "generating", "group": 14}, {"event": "drawn", "group": 14, "samples": []}]
        ),
        "group 14 was drawn while it was generating",
    ),
    "one sample in two groups": (_steal_sample, "sample 2 is in group 1 and in group 6"),
    "beyond the cursor": (_draw_beyond, "groups 14 were drawn, though the commit's cursor stands at group 14"),
    "taken and not trained": (
        lambda e, f, s: _without(e, "trained", group=1),
        "group 1 was taken for rollout 1 and is not recorded as trained, though the commit is of rollout 4",
    ),
    "trained and not taken": (
        lambda e, f, s: _without(e, "taken", group=1),
        "group 1 was trained at rollout 1, for which it was not taken",
    ),
    "trained in the future": (
        lambda e, f, s: (_of(e, "taken", group=1).update(rollout=9), _of(e, "trained", group=1).update(rollout=9)),
        "group 1 was trained at rollout 10, after the commit's 4",
    ),
    "a rollout is missing": (
        lambda e, f, s: _without(e, "rollout", rollout=2),
        "rollout 3 was trained on, and no group was recorded for it",
    ),
    "a rollout twice": (lambda e, f, s: e.append(_of(e, "rollout", rollout=2)), "rollout 3 is recorded twice"),
    "too few groups": (
        lambda e, f, s: _of(e, "rollout", rollout=1).update(groups=2),
        "rollout 2 had 2 groups instead of --rollout-batch-size 3, and no reason is recorded",
    ),
    "miscounted groups": (
        lambda e, f, s: _of(e, "rollout", rollout=1).update(groups=2, reason="short"),
        "rollout 2 had 2 groups, but 3 are recorded as taken for it",
    ),
    "a row is missing": (
        _drop_row,
        "epoch 0: the cursor has passed 10 rows, and 9 are accounted for; missing: rows 4",
    ),
    "a row twice": (_repeat_row, "epoch 0: rows 0 came up more than once"),
    "a row of another epoch": (_later_row, "rows of epochs 9 are recorded; the commit's cursor stands in epoch 1"),
    "another commit's": (lambda e, f, s: f.update(rollout=2), "ledger.json is of rollout 3, the commit of rollout 4"),
    "lost by the rollout": (
        lambda e, f, s: _of(e, "dropped", group=3).update(reason="left out by the rollout function"),
        "group 3 was drawn and then lost by a rollout function that accounts for every group",
    ),
    "lost by the buffer": (
        lambda e, f, s: _of(e, "dropped", group=3).update(reason="removed by the buffer"),
        "group 3 was given back and is gone from the buffer, which does not declare that it drops groups",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_corruption_is_named(commit: Path, name: str) -> None:
    edit, expected = CORRUPTIONS[name]
    rewrite(commit, edit)
    problems = check(commit).problems
    assert any(line.startswith(expected) for line in problems), problems
    assert len(problems) <= 4, "one fault is not a flood"


def test_staleness_is_held_to_the_limit(commit: Path) -> None:
    def age(events: Events, found: Any, state: Any) -> None:
        _of(events, "taken", group=1)["versions"] = [0, 1]

    rewrite(commit, age)
    assert check(commit).problems == []
    rewrite(commit, lambda e, f, s: None, max_staleness=1)
    assert check(commit).problems == []
    rewrite(commit, lambda e, f, s: None, max_staleness=0)
    assert (
        "group 1 trained weights of version 1 at rollout 1 with tokens of version 0: staleness 1, --max-staleness 0"
        in check(commit).problems
    )
    late = {"event": "training", "rollout": 0, "version": 4, "versions": {"1": [0, 4], "2": [1, 1], "0": None}}
    rewrite(commit, lambda e, f, s: e.append(late), max_staleness=3)
    (line,) = check(commit).problems
    assert "staleness 4, --max-staleness 3" in line


def _ahead(*later: dict[str, Any]) -> Callable[..., None]:
    """Group 14, with tokens of version 1, is taken by version 4 for the rollout after the commit's; then more."""

    def edit(events: Events, found: Any, state: Any) -> None:
        taken = {"event": "taken", "group": 14, "rollout": 4, "samples": 2, "version": 4, "versions": [1, 4]}
        events.extend([taken, *later])

    return edit


def _stale(commit: Path) -> list[str]:
    return [line for line in check(commit).problems if "staleness" in line]


def test_what_waits_for_training_is_not_held_to_the_limit_yet(commit: Path) -> None:
    """Its turn comes with a later commit: until then the policy may mask or replace its old tokens."""
    rewrite(commit, _ahead(), max_staleness=1)
    assert _stale(commit) == []
    history = dataclasses.replace(read_history(commit), rollout_id=4)
    (line,) = [line for line in verify(history).problems if "staleness" in line]
    assert line.startswith("group 14 trained weights of version 4 at rollout 5 with tokens of version 1: staleness 3")


def test_what_is_declared_is_allowed(commit: Path) -> None:
    rewrite(commit, _twice, replays=1)
    report = check(commit)
    assert [p for p in report.problems if "rollout 4 had" not in p] == []
    assert report.facts["trained_again"] == 1
    rewrite(commit, _twice)
    assert any("trained on 3 times" in p and "once and 1 times again" in p for p in check(commit).problems)
    rewrite(commit, lambda e, f, s: None, replays=-1)
    report = check(commit)
    assert not any("times" in p for p in report.problems)
    assert "any number of times" in report.notes[0]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "replace"])
def test_a_damaged_segment_is_named(commit: Path, damage: str) -> None:
    second = sorted((commit.parent / SEGMENTS).iterdir())[1]
    content = second.read_bytes()
    if damage == "flip":
        second.write_bytes(content.replace(b'"scored"', b'"Scored"', 1))
    elif damage == "cut":
        second.write_bytes(content[:-20])
    elif damage == "remove":
        second.unlink()
    else:
        second.write_bytes(sorted((commit.parent / SEGMENTS).iterdir())[2].read_bytes())
    with pytest.raises(CheckpointError, match=second.name):
        read_history(commit)
    assert check(commit.parent / "rollout_0000000").problems == []


def test_saved_and_external_groups_are_held_to_double_training_only(tmp_path: Path) -> None:
    class Outside:
        """A source that is never asked."""

        def state_dict(self) -> dict[str, Any]:
            return {}

    def made(index: int) -> list[Sample]:
        return [Sample(group_index=index, index=index, tokens=[1, 2], response_length=1, reward=1.0,
                       status=Sample.Status.COMPLETED)]  # fmt: skip

    run = LedgerRun(tmp_path, None, Outside())
    run.stage.parts.rollout_function = lambda args, rollout_id, source, evaluation=False: [
        made(100 + rollout_id), made(200)
    ]  # fmt: skip
    report = check(run.go(range(1)))
    assert (report.problems, report.facts["foreign"], report.facts["drawn"]) == ([], 2, 0)
    assert "no cursor" in report.notes[0]
    assert check(run.go(range(1, 2))).problems == [
        "group 200 was trained on 2 times (rollouts 1, 2); allowed: once"
    ]  # fmt: skip


def test_show_follows_a_group(commit: Path) -> None:
    records = replay(read_history(commit)).groups
    assert records[0].describe() == "trained at rollout 1"
    assert records[3].describe() == "dropped: too easy"
    assert records[14].describe() == "buffered"
    stored = orjson.loads((commit / "ledger.json").read_bytes())
    assert stored["open"] == [{"group": 14, "state": "buffered"}]
