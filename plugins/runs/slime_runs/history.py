"""Read the ledger of one commit: its events in order, and the resulting state per group, row and rollout.

`read_history` reads files and checks their digests; `replay` is a pure function of the history. The checks are in
`checkpoint.ledger_verify`; `slime ledger show` prints the results. A group can be drawn several times if the buffer
declares that it replays groups after training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from slime_core.checkpoint.store import read_state
from slime_core.data.ledger import (
    BUFFERED,
    DRAWN,
    DROPPED,
    RECYCLED,
    ROLLOUT,
    SKIPPED,
    TAKEN,
    TRAINED,
    TRAINING,
    UNTAKEN,
)
from slime_core.data.ledger_files import Segment, SegmentRef, read_chain, read_commit, segments_of
from slime_core.errors import CheckpointError, rollout_name
from slime_core.files import read_regular
from slime_core.rollout.state import OPEN_GROUPS_FILE, STATE_FILE, group_indices

Event = dict[str, Any]


@dataclass(frozen=True)
class History:
    """The ledger of one commit and its event segments."""

    commit: Path
    rollout_id: int
    """The last rollout that the commit's weights were trained on."""
    found: dict[str, Any]
    """Content of the commit's `ledger.json`."""
    segments: list[Segment]
    stored: frozenset[int]
    """`group_index` of every group whose samples the commit holds."""

    def events(self) -> Iterator[tuple[Segment, Event]]:
        """Yield every event with its segment, oldest segment first; inside a segment, by group."""
        for segment in self.segments:
            for event in segment.events:
                yield segment, event

    @property
    def start(self) -> dict[str, Any]:
        """Return the start of the ledger: "cursor", "open" groups, and the first "rollout" if it is known."""
        declared = self.segments[0].header.get("start") if self.segments else None
        return declared or {"cursor": None, "open": [], "rollout": None}


@dataclass
class GroupRecord:
    """A group's record after the events replayed so far."""

    index: int
    state: str | None = None
    """State of the group while it is open and not taken; None if it is not open."""
    is_drawn: bool = False
    """True if the data source drew the group first, so its number is the source's own; False for foreign groups."""
    pending: Counter[int] = field(default_factory=Counter)
    """Rollout -> times that the group was taken for it and not yet trained on."""
    trained: list[int] = field(default_factory=list)
    """Rollouts that trained on the group, one entry per time."""
    dropped: str | None = None
    """Reason for the drop, if the group ended as dropped."""
    retries: int = 0

    @property
    def times(self) -> int:
        """Return the number of times that the group was trained on or is taken for training."""
        return len(self.trained) + sum(self.pending.values())

    def describe(self) -> str:
        """Return the state as short text."""
        words = [self.state] if self.state else []
        words += [f"taken for {rollout_name(r)}" for r in sorted(+self.pending)]
        words += [f"trained at {rollout_name(r)}" for r in self.trained]
        words += [f"dropped: {self.dropped}"] if self.dropped else []
        return ", ".join(words) or "unknown"


@dataclass
class RolloutRecord:
    """A rollout whose groups were taken for training."""

    groups: int
    expected: int
    reason: str | None
    may_differ: bool
    """True if the rollout function chooses the number of groups."""
    taken: int = 0
    """Number of groups taken for it, according to the events."""


@dataclass
class Replay:
    """The state after replaying all events."""

    groups: dict[int, GroupRecord] = field(default_factory=dict)
    rollouts: dict[int, RolloutRecord] = field(default_factory=dict)
    rows: dict[int, Counter[int]] = field(default_factory=dict)
    """Epoch -> row -> number of times that it was drawn as a fresh prompt or skipped."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> number of skipped rows."""
    samples: dict[int, int] = field(default_factory=dict)
    """Sample index -> group that was drawn with this sample."""
    stale: list[tuple[Event, int | None]] = field(default_factory=list)
    """Events of groups taken and not given back, with the `--max-staleness` of that time."""
    retold: dict[int, Event] = field(default_factory=dict)
    """Rollout -> later event with the groups that trained, if they were not known when the rollout was taken."""
    returned: Counter[int] = field(default_factory=Counter)
    """Rollout -> groups that were taken for it and given back."""
    foreign: int = 0
    """Number of taken groups that no data source had drawn."""
    problems: list[str] = field(default_factory=list)
    """Events that contradict earlier events."""


def read_history(commit: Path) -> History:
    """Read the ledger of a commit.

    Raises:
        CheckpointError: The commit has no ledger, or a file is missing or changed.
    """
    found = read_commit(commit)
    if found is None:
        raise CheckpointError(f"{commit}: no ledger: the commit was made by a version without one")
    segments = read_chain(segments_of(commit), SegmentRef.of(found["segment"]))
    return History(commit, int(read_state(commit)["rollout_id"]), found, segments, frozenset(_stored(commit)))


def _stored(commit: Path) -> set[int]:
    stored: set[int] = set()
    if (commit / STATE_FILE).is_file():
        stored |= group_indices(orjson.loads(read_regular(commit / STATE_FILE)))
    if (commit / OPEN_GROUPS_FILE).is_file():
        for line in read_regular(commit / OPEN_GROUPS_FILE).splitlines():
            stored |= group_indices(orjson.loads(line))
    return stored


def replay(history: History) -> Replay:
    """Follow every group through the events; record impossible events as problems and continue after them."""
    result = Replay()
    for entry in history.start["open"]:
        record = result.groups.setdefault(entry["group"], GroupRecord(entry["group"]))
        if entry["state"] == TAKEN:
            record.pending[entry["rollout"]] += 1
        else:
            record.state = entry["state"]
    for segment, event in history.events():
        policy = segment.header["policy"]
        kind, index = event["event"], event.get("group")
        if kind == SKIPPED:
            result.skipped[event["reason"]] += 1
            result.rows.setdefault(event["epoch"], Counter())[event["row"]] += 1
        elif kind == ROLLOUT:
            _note_rollout(result, event, policy)
        elif kind == TRAINING:
            result.retold[event["rollout"]] = event
        elif kind == UNTAKEN:
            result.rollouts.pop(event["rollout"], None)
        elif index is None:
            result.foreign += 1
            result.stale.append((event, policy["max_staleness"]))
        else:
            _STEPS.get(kind, _moved)(result, event, policy)
    for _, event in history.events():  # a segment orders events by group, so rollouts are known only now
        if event["event"] == TAKEN and event["rollout"] in result.rollouts:
            result.rollouts[event["rollout"]].taken += 1
    for rollout in result.returned.keys() & result.rollouts.keys():
        result.rollouts[rollout].taken -= result.returned[rollout]
    return result


def _note_rollout(result: Replay, event: Event, policy: dict[str, Any]) -> None:
    number = event["rollout"]
    if number in result.rollouts:
        result.problems.append(f"{rollout_name(number)} is recorded twice")
    result.rollouts[number] = RolloutRecord(
        event["groups"], policy["groups_per_rollout"], event.get("reason"), policy["leaves_out"]
    )


def _drawn(result: Replay, event: Event, policy: dict[str, Any]) -> None:
    index = event["group"]
    record = result.groups.get(index)
    if record is None:
        record = result.groups[index] = GroupRecord(index, is_drawn=True)
        for sample in event["samples"]:
            if sample is not None and result.samples.setdefault(sample, index) != index:
                result.problems.append(f"sample {sample} is in group {result.samples[sample]} and in group {index}")
    elif record.dropped is not None:
        result.problems.append(f"group {index} was drawn after it was dropped ({record.dropped})")
    elif record.state not in (None, BUFFERED, RECYCLED):
        result.problems.append(f"group {index} was drawn while it was {record.state}")
    elif record.state is None and not policy["replays"]:
        result.problems.append(f"group {index} was drawn again, though it is {record.describe()}")
    record.state = DRAWN
    if "row" in event:
        result.rows.setdefault(event["epoch"], Counter())[event["row"]] += 1


def _moved(result: Replay, event: Event, policy: dict[str, Any]) -> None:
    """`generating`, `scored`, `buffered`, `recycled`."""
    index, state = event["group"], event["event"]
    record = result.groups.setdefault(index, GroupRecord(index))
    if state == BUFFERED and +record.pending:  # taken but not trained on, and given back by a run of another mode
        result.returned.update(record.pending)
        result.stale = [(e, m) for e, m in result.stale if e["group"] != index or not record.pending[e["rollout"]]]
        record.pending.clear()
    elif record.state is None and (record.trained or record.dropped is not None):
        result.problems.append(f"group {index} is recorded as {state}, though it is {record.describe()}")
    record.state = state
    record.retries = event.get("retries", record.retries)


def _dropped(result: Replay, event: Event, policy: dict[str, Any]) -> None:
    index = event["group"]
    record = result.groups.setdefault(index, GroupRecord(index))
    if record.state is None:
        result.problems.append(f"group {index} was dropped ({event['reason']}), though it is {record.describe()}")
    record.state = None
    if not record.times:  # if the group was already trained on, only its repetition is dropped
        record.dropped = event["reason"]


def _taken(result: Replay, event: Event, policy: dict[str, Any]) -> None:
    index = event["group"]
    record = result.groups.get(index)
    if record is None:
        record = result.groups[index] = GroupRecord(index)
        result.foreign += 1
    elif record.dropped is not None:
        result.problems.append(
            f"group {index} was taken for {rollout_name(event['rollout'])} after it was dropped ({record.dropped})"
        )
    record.state = None
    record.pending[event["rollout"]] += 1
    result.stale.append((event, policy["max_staleness"]))


def _trained(result: Replay, event: Event, policy: dict[str, Any]) -> None:
    index, rollout = event["group"], event["rollout"]
    record = result.groups.setdefault(index, GroupRecord(index))
    if record.pending[rollout]:
        record.pending[rollout] -= 1
    else:
        result.problems.append(f"group {index} was trained at {rollout_name(rollout)}, for which it was not taken")
    record.trained.append(rollout)


_STEPS = {DRAWN: _drawn, DROPPED: _dropped, TAKEN: _taken, TRAINED: _trained}
