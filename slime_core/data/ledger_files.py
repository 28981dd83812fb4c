"""The ledger on disk: one immutable segment of events per commit, each naming the one before it.

    <checkpoints>/ledger/0000001-5f0c21d7.jsonl     number in the chain, and the beginning of the content's digest
    <commit>/ledger.json                            names the newest segment that belongs to the commit, with its digest

The first line of a segment is its header: the reference of the segment before (null at the start of a chain), the
rollout of its commit and the run's declaration (`policy`). So a commit writes only the events since the last one, and
its `ledger.json` verifies the whole history. `rollout.state` writes segments, `slime ledger verify` reads them,
`checkpoint.store` removes segments that no commit names. A segment is on disk before the commit that names it, so a
killed run may leave an unnamed segment. Names come from content, so it is never mistaken for another segment, and
writing it again changes nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from slime_core.errors import CheckpointError
from slime_core.files import flush, open_regular, read_regular, replace_file

LEDGER_FILE, SEGMENTS = "ledger.json", "ledger"
FORMAT = "slime-ledger-1"
_NAME = re.compile(r"(\d{7,})-[0-9a-f]{8}\.jsonl")


@dataclass(frozen=True)
class SegmentRef:
    """A reference to a segment: its name, size and digest."""

    name: str
    blake2b: str
    size: int
    """Size in bytes."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> SegmentRef:
        """Return the reference in JSON form `data`."""
        return cls(str(data["name"]), str(data["blake2b"]), int(data["size"]))

    @property
    def number(self) -> int:
        """Position in the chain, from 1."""
        found = _NAME.fullmatch(self.name)
        return int(found[1]) if found else 0


@dataclass(frozen=True)
class Segment:
    """A ledger segment that was read from its file."""

    ref: SegmentRef
    header: dict[str, Any]
    events: list[dict[str, Any]]


def write_segment(
    directory: Path, previous: SegmentRef | None, header: Mapping[str, object], lines: Sequence[bytes]
) -> SegmentRef:
    """Write one segment and flush it, with its directory entry, to the device; complete or not at all.

    Args:
        directory: `<checkpoints>/ledger`; created if missing.
        previous: The last segment of the chain; None starts one.
        header: Rollout of the commit and the run's declaration.
        lines: Events as JSON.

    Raises:
        CheckpointError: The last segment is gone.
    """
    if previous and not (directory / previous.name).is_file():
        raise CheckpointError(
            f"{directory / previous.name} has been removed while the run wrote there: a commit without this ledger"
            " segment could not be resumed"
        )
    before = asdict(previous) if previous else None
    number = previous.number + 1 if previous else 1
    head = orjson.dumps({"format": FORMAT, "segment": number, "previous": before, **header})
    content = b"".join(line + b"\n" for line in [head, *lines])
    digest = _digest(content)
    ref = SegmentRef(f"{number:07d}-{digest[:8]}.jsonl", digest, len(content))
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / ref.name, content, durable=True)
    flush(directory.parent)
    return ref


def _read_segment(directory: Path, ref: SegmentRef) -> Segment:
    """Read a segment. Raises CheckpointError if it is missing or does not match the reference."""
    path = directory / ref.name
    try:
        content = read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path}: ledger segment cannot be read: {error.strerror or error}") from error
    if len(content) != ref.size or _digest(content) != ref.blake2b:
        raise CheckpointError(f"{path}: ledger segment is not what its commit names (size or digest differs)")
    try:
        header, *events = [orjson.loads(line) for line in content.splitlines()]
    except (orjson.JSONDecodeError, ValueError) as error:
        raise CheckpointError(f"{path}: ledger segment is no JSON: {error}") from error
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {header.get('format')!r}; this version reads {FORMAT!r}")
    return Segment(ref, header, events)


def read_chain(directory: Path, last: SegmentRef | None) -> list[Segment]:
    """Return all segments up to `last`, oldest first. Raises CheckpointError that names the first wrong segment."""
    chain: list[Segment] = []
    ref = last
    while ref is not None:
        segment = _read_segment(directory, ref)
        chain.append(segment)
        before = segment.header["previous"]
        ref = SegmentRef.of(before) if before else None
        if ref is not None and ref.number != segment.ref.number - 1:
            raise CheckpointError(
                f"{directory}: ledger segment {segment.ref.name} follows {ref.name}: one between them is missing"
            )
    return chain[::-1]


def adopt_chain(directory: Path, source: Path, last: SegmentRef) -> None:
    """Copy what of a chain is not in `directory` from another store's. Raises CheckpointError for a broken one."""
    ref: SegmentRef | None = last
    while ref is not None and not (directory / ref.name).is_file():
        segment = _read_segment(source, ref)
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / ref.name, read_regular(source / ref.name), durable=True)
        before = segment.header["previous"]
        ref = SegmentRef.of(before) if before else None


def remove_orphans(directory: Path, named: Iterable[SegmentRef]) -> list[str]:
    """Delete segments outside the chains of `named`, and return their names. Delete nothing if a chain is broken."""
    needed: set[str] = set()
    for last in named:
        ref: SegmentRef | None = last
        while ref is not None and ref.name not in needed:
            needed.add(ref.name)
            try:
                with open_regular(directory / ref.name) as file:
                    before = orjson.loads(file.readline()).get("previous")
            except (OSError, orjson.JSONDecodeError):
                return []  # `slime ledger verify` reports the error
            ref = SegmentRef.of(before) if before else None
    if not directory.is_dir():
        return []
    orphans = [p for p in directory.iterdir() if _NAME.fullmatch(p.name) and p.name not in needed]
    for path in [*orphans, *directory.glob(".*.partial")]:
        path.unlink()
    return sorted(path.name for path in orphans)


def read_commit(commit: Path) -> dict[str, Any] | None:
    """Return a commit's ledger entry; None if the commit has no ledger.

    Raises:
        CheckpointError: The entry cannot be read, or has another format.
    """
    path = commit / LEDGER_FILE
    if not path.is_file():
        return None
    try:
        found: dict[str, object] = orjson.loads(read_regular(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if found.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {found.get('format')!r}; this version reads {FORMAT!r}")
    return found


def segments_of(commit: Path) -> Path:
    """Return the directory of segments of the store that holds the commit."""
    return commit.parent / SEGMENTS


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
