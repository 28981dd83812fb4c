"""What the ledger records, and how its segments lie on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from slime_core.data.ledger import Ledger, PassedRow, RecordedSource
from slime_core.data.ledger_files import SegmentRef, adopt_chain, read_chain, remove_orphans, write_segment
from slime_core.errors import CheckpointError
from slime_core.sample import Group, Sample


def group(index: int | None, size: int = 2) -> list[Sample]:
    return [Sample(group_index=index, index=None if index is None else index * size + i) for i in range(size)]


def events(ledger: Ledger) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in ledger.snapshot().lines]


def test_a_group_from_draw_to_training() -> None:
    ledger = Ledger()
    one = group(0)
    ledger.drawn([one], {0: PassedRow(2, 7, 0, None)})
    ledger.drawn([one])  # recorded by the source, and again by the rollout function
    ledger.generating([one])
    ledger.scored(one)
    ledger.scored(one)
    ledger.taken(3, [one], weight_version=5)
    assert ledger.snapshot().open == [{"group": 0, "state": "taken", "rollout": 3, "version": 5}]
    ledger.training(3, [one], 5)  # nothing new
    ledger.trained_through(2)
    assert ledger.snapshot().open != []
    ledger.trained_through(3)
    assert ledger.snapshot().open == []
    assert events(ledger) == [
        {"event": "drawn", "group": 0, "samples": [0, 1], "row": 7, "epoch": 2},
        {"event": "generating", "group": 0},
        {"event": "scored", "group": 0},
        {"event": "taken", "group": 0, "rollout": 3, "samples": 2, "version": 5},
        {"event": "trained", "group": 0, "rollout": 3},
        {"event": "rollout", "rollout": 3, "groups": 1},
    ]


def test_a_recorded_source_is_the_source_to_user_code() -> None:
    class Listed:
        """A source that is more than one."""

        seen = 0

        def get_samples(self, num_samples: int) -> list[Group]:
            return [group(i) for i in range(num_samples)]

        def add_samples(self, samples: list[Group]) -> None:
            self.seen += len(samples)

        def __len__(self) -> int:
            return 7

        def __getitem__(self, row: int) -> str:
            return f"row {row}"

    class Plain:
        pass

    ledger = Ledger()
    listed: Any = RecordedSource(Listed(), ledger)
    plain: Any = RecordedSource(Plain(), ledger)
    assert isinstance(listed, Listed)
    assert isinstance(listed, RecordedSource)
    assert type(listed).__name__ == listed.__class__.__name__ == "Listed"
    assert (len(listed), listed[3], bool(listed)) == (7, "row 3", True)
    assert isinstance(plain, Plain)
    assert not isinstance(plain, Listed)
    assert not hasattr(plain, "__len__")
    assert plain
    listed.get_samples(2)
    listed.add_samples([group(0)])
    assert listed.seen == 1
    assert [e["event"] for e in events(ledger)] == ["drawn", "buffered", "drawn"]


def test_what_is_neither_taken_nor_given_back_is_left_out() -> None:
    ledger = Ledger()
    groups = [group(i) for i in range(4)]
    ledger.drawn(groups)
    ledger.buffered(groups[:1], "in excess")
    ledger.dropped(groups[1], "too easy")
    ledger.dropped(groups[1], "twice is once")
    ledger.taken(0, groups[2:3])
    ledger.settle()
    dropped = [(e["group"], e["reason"]) for e in events(ledger) if e["event"] == "dropped"]
    assert dropped == [(1, "too easy"), (3, "left out by the rollout function")]
    ledger.reconcile({0})
    assert {"group": 0, "state": "buffered"} in ledger.snapshot().open
    ledger.reconcile(set())
    assert all(entry["group"] != 0 for entry in ledger.snapshot().open)
    assert events(ledger)[2]["reason"] == "removed by the buffer"


def test_a_run_that_returns_to_a_commit_draws_its_groups_again(caplog: pytest.LogCaptureFixture) -> None:
    class Source:
        def get_samples(self, num_samples: int) -> list[Group]:
            return [group(i) for i in range(num_samples)]

    ledger = Ledger()
    source = RecordedSource(Source(), ledger)
    for _ in range(2):
        groups = source.get_samples(2)
        ledger.taken(0, groups[:1])
        ledger.dropped(groups[1], "too easy")
        ledger.short(1, "the budget is spent")
        ledger.restore([])
        assert ledger.take_reasons() == {}
    assert not caplog.records
    ledger.taken(1, [group(2)])
    assert "reason" not in events(ledger)[-1]


def test_parts_of_one_group_are_one_and_repetitions_are_not() -> None:
    ledger = Ledger()
    halves = [[s] for s in group(0)]
    ledger.taken(0, [*halves, group(1), group(1), group(None), group(None)])
    taken = [(e["group"], e["samples"], e.get("foreign")) for e in events(ledger) if e["event"] == "taken"]
    assert taken == [(0, 2, True), (1, 2, True), (1, 2, True), (None, 2, None), (None, 2, None)]


# -- segments ----------------------------------------------------------------------------------------


def chain(directory: Path, length: int, previous: SegmentRef | None = None, word: str = "a") -> list[SegmentRef]:
    refs = []
    for number in range(length):
        previous = write_segment(directory, previous, {"rollout": number}, [orjson.dumps({"event": f"{word}{number}"})])
        refs.append(previous)
    return refs


def test_a_chain_whose_last_segment_is_gone_is_not_continued(tmp_path: Path) -> None:
    """A commit with the next segment could not be resumed."""
    first = write_segment(tmp_path, None, {"rollout": 0}, [])
    (tmp_path / first.name).unlink()
    with pytest.raises(CheckpointError, match="has been removed while the run wrote there"):
        write_segment(tmp_path, first, {"rollout": 1}, [])
    assert not list(tmp_path.iterdir())


def test_a_chain_is_read_back(tmp_path: Path) -> None:
    refs = chain(tmp_path / "ledger", 3)
    read = read_chain(tmp_path / "ledger", refs[-1])
    assert [s.events for s in read] == [[{"event": f"a{i}"}] for i in range(3)]
    assert [s.ref for s in read] == refs
    assert [r.name[:8] for r in refs] == ["0000001-", "0000002-", "0000003-"]
    assert chain(tmp_path / "ledger", 3) == refs, "the same again is no change"
    assert len(list((tmp_path / "ledger").iterdir())) == 3
    assert read_chain(tmp_path / "ledger", None) == []


def test_only_segments_that_no_commit_needs_are_removed(tmp_path: Path) -> None:
    directory = tmp_path / "ledger"
    refs = chain(directory, 3)
    orphan = chain(directory, 1, refs[0], "b")[0]
    (directory / ".x.partial").write_text("")
    (directory / "notes.txt").write_text("mine")
    assert remove_orphans(directory, [refs[1]]) == sorted([refs[2].name, orphan.name])
    assert sorted(p.name for p in directory.iterdir()) == [refs[0].name, refs[1].name, "notes.txt"]
    (directory / refs[0].name).unlink()
    assert remove_orphans(directory, [refs[1]]) == [], "what cannot be followed back is left alone"
    assert (directory / refs[1].name).is_file()
    assert remove_orphans(tmp_path / "none", []) == []


def test_a_chain_is_adopted_from_another_store(tmp_path: Path) -> None:
    refs = chain(tmp_path / "a", 3)
    chain(tmp_path / "b", 1)  # the same first segment
    adopt_chain(tmp_path / "b", tmp_path / "a", refs[-1])
    assert len(read_chain(tmp_path / "b", refs[-1])) == 3
    (tmp_path / "a" / refs[1].name).write_bytes(b"{}\n")
    with pytest.raises(CheckpointError, match="is not what its commit names"):
        adopt_chain(tmp_path / "c", tmp_path / "a", refs[-1])
