"""What became of a group, from the ledger's segments, found without reading all of them into memory.

A long run's ledger has a million events; a page asks for those of a few groups. The segments of the newest commit's
chain are searched as bytes, and only lines that match are parsed. Digests are not checked: `slime ledger verify` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from slime_core.data.ledger_files import LEDGER_FILE, SegmentRef, read_commit, segments_of
from slime_core.errors import CheckpointError

Event = dict[str, Any]


def chain(run_dir: Path) -> list[Path]:
    """Segments of the newest commit, oldest first; none where there is no commit, or one is missing or unreadable."""
    commits = sorted((run_dir / "checkpoints").glob(f"rollout_*/{LEDGER_FILE}"))
    try:
        told = read_commit(commits[-1].parent) if commits else None
    except CheckpointError:
        return []
    if told is None:
        return []
    folder = segments_of(commits[-1].parent)
    found: list[Path] = []
    ref: SegmentRef | None = SegmentRef.of(told["segment"])
    while ref is not None:
        path = folder / ref.name
        try:
            with path.open("rb") as file:
                before = orjson.loads(file.readline()).get("previous")
        except (OSError, orjson.JSONDecodeError):
            return []
        found.append(path)
        ref = SegmentRef.of(before) if before else None
    return found[::-1]


def events_of(segments: Sequence[Path], groups: Sequence[int]) -> dict[int, list[Event]]:
    """Group -> its events in order, each with "committed", the rollout of the commit that has it first."""
    found: dict[int, list[Event]] = {group: [] for group in groups}
    for path in segments:
        content = path.read_bytes()
        rollout = orjson.loads(content[: content.index(b"\n")]).get("rollout")
        for group in groups:
            for line in _lines(content, b'"group":%d' % group):
                found[group].append({**orjson.loads(line), "committed": rollout})
    return found


def groups_of(segments: Sequence[Path], row: int) -> list[int]:
    """The groups that were drawn with this row of the data as their prompt, in order."""
    found: dict[int, None] = {}
    for path in segments:
        for line in _lines(path.read_bytes(), b'"row":%d' % row):
            event = orjson.loads(line)
            if event.get("event") == "drawn":
                found[event["group"]] = None
    return list(found)


def drop_reasons(segment: Path) -> dict[int, str]:
    """Group -> why it was dropped."""
    events = (orjson.loads(line) for line in _lines(segment.read_bytes(), b'"event":"dropped"'))
    return {event["group"]: event["reason"] for event in events if event.get("group") is not None}


def _lines(content: bytes, field: bytes) -> Iterator[bytes]:
    """Lines that have the field with this value."""
    for match in re.finditer(re.escape(field) + rb"[,}]", content):
        start = content.rfind(b"\n", 0, match.start()) + 1
        end = content.find(b"\n", match.end() - 1)
        yield content[start : end if end >= 0 else len(content)]
