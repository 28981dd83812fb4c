"""Look up the events of a group, or of a row of the data, in the ledger's segments.

A long run's ledger has a million events, and a page needs the events of a few groups. The segments of the newest commit
are searched as bytes, and only matching lines are parsed. Digests are not checked here; `slime ledger verify` checks
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from slime_core.data.ledger_files import LEDGER_FILE, SegmentRef, read_commit, segments_of
from slime_core.errors import CheckpointError
from slime_core.files import open_regular, read_regular
from slime_runs.run import Run

Event = dict[str, Any]
_LONGEST_HEADER = 1 << 20
_GROUP = re.compile(rb'"group":(\d+)')


class LedgerIndex:
    """The ledger of one run; caches the range of groups of each segment. Not thread-safe."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[Path, _Segment] = {}

    def events(self, groups: Sequence[int]) -> dict[int, list[Event]]:
        """Return group -> its events in order, each with "committed", the rollout of the first commit that has it."""
        found: dict[int, list[Event]] = {group: [] for group in groups}
        for segment in self._segments():
            for group, events in segment.events(groups).items():
                found[group] += events
        return found

    def groups_of(self, row: int) -> list[int]:
        """Return the groups whose prompt is this row of the data, in the order in which they were drawn."""
        return list(dict.fromkeys(group for segment in self._segments() for group in segment.groups_of(row)))

    def dropped_for(self) -> dict[int, str]:
        """Return dropped group -> reason."""
        return {group: reason for segment in self._segments() for group, reason in segment.reasons.items()}

    def _segments(self) -> list[_Segment]:
        """Return the segments, oldest first; empty without a commit, or if a segment is missing or unreadable."""
        commits = sorted(self._run.checkpoints.glob(f"rollout_*/{LEDGER_FILE}"))
        try:
            told = read_commit(commits[-1].parent) if commits else None
        except CheckpointError:
            return []
        found: list[_Segment] = []
        ref = None if told is None else SegmentRef.of(told["segment"])
        while ref is not None:
            path = segments_of(commits[-1].parent) / ref.name
            try:
                segment = self._known.setdefault(path, _Segment(path))
            except (OSError, orjson.JSONDecodeError):
                return []
            found.append(segment)
            before = segment.header.get("previous")
            ref = SegmentRef.of(before) if before else None
        return found[::-1]


class _Segment:
    """A segment file; its events are ordered by group (`slime_core.data.ledger`), events without a group last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_regular(path) as file:
            self.header: dict[str, Any] = orjson.loads(file.readline(_LONGEST_HEADER))

    def events(self, groups: Sequence[int]) -> dict[int, list[Event]]:
        low, high = self._bounds
        here = [group for group in groups if low <= group <= high]
        content, rollout = read_regular(self._path) if here else b"", self.header.get("rollout")
        return {
            group: [{**orjson.loads(line), "committed": rollout} for line in _lines(content, b'"group":%d' % group)]
            for group in here
        }

    def groups_of(self, row: int) -> list[int]:
        events = map(orjson.loads, _lines(read_regular(self._path), b'"row":%d' % row))
        return [event["group"] for event in events if event.get("group") is not None]

    @cached_property
    def reasons(self) -> dict[int, str]:
        events = map(orjson.loads, _lines(read_regular(self._path), b'"event":"dropped"'))
        return {event["group"]: event["reason"] for event in events if event.get("group") is not None}

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        """The first and the last group in the segment; (0, -1) without groups."""
        content = read_regular(self._path)
        first = _GROUP.search(content)
        last = _GROUP.search(content, content.rfind(b'"group":'))
        return (0, -1) if first is None or last is None else (int(first[1]), int(last[1]))


def _lines(content: bytes, field: bytes) -> Iterator[bytes]:
    """Yield the lines that contain `field`, a JSON key with its value."""
    at = content.find(field)
    while at >= 0:
        start, end = content.rfind(b"\n", 0, at) + 1, content.find(b"\n", at)
        if content[at + len(field)] in b",}":
            yield content[start : end if end >= 0 else len(content)]
        at = content.find(field, at + len(field))
