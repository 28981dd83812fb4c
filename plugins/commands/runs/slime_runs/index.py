"""The index of stored samples: SQLite, so that a filter over a run opens no file; what is in it can be made again.

The writer keeps `samples/index.sqlite`. A reader never writes into a run: what the index lacks (a run that was copied
without it, one whose writer died between file and index) it adds to a copy in memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from slime_core.provenance import NOT_SAMPLED
from slime_runs.files import INDEX, Frame, Row, parse_name, read_frames, sample_files

_COLUMNS = (
    "file", "rollout", "data_set", "group_index", "sample_index", "place", "offset", "size", "score", "status", "fate",
    "prompt_tokens", "response_tokens", "trained_tokens", "oldest_version", "newest_version", "failure",
)  # fmt: skip
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, thinned INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS samples ({", ".join(_COLUMNS)});
CREATE INDEX IF NOT EXISTS of_rollout ON samples (data_set, rollout, score);
CREATE INDEX IF NOT EXISTS of_group ON samples (group_index);
CREATE INDEX IF NOT EXISTS of_file ON samples (file);
PRAGMA user_version = 1;
"""
_VERSION = 1

ORDERS = {
    "rollout": "rollout DESC, group_index, sample_index, rowid",
    "best": "score IS NULL, score DESC, rollout DESC, rowid",
    "worst": "score IS NULL, score, rollout DESC, rowid",
    "file": "file, rowid",
}


@dataclass(frozen=True)
class Entry:
    """What the index knows of a sample."""

    file: str
    rollout: int
    """Counted from 0; of an evaluation, how many rollouts were trained on before."""
    data_set: str | None
    """Of an evaluation; None in training."""
    group_index: int | None
    sample_index: int | None
    place: int
    """In its group's frame."""
    offset: int
    size: int
    score: float | None
    status: str
    fate: str
    """"trained", "dropped", "failed" or "evaluated"."""
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    oldest_version: int | None
    newest_version: int | None
    failure: str | None

    @property
    def frame(self) -> Frame:
        """Where its group lies in the file."""
        return Frame(self.offset, self.size)


@dataclass(frozen=True)
class Filter:
    """Which samples; None is any."""

    rollout: int | None = None
    data_set: str | None = None
    """Name of an evaluation's data set, "" for training alone."""
    group_index: int | None = None
    sample_index: int | None = None
    file: str | None = None
    status: str | None = None
    fate: str | None = None
    failed: bool = False
    min_score: float | None = None
    max_score: float | None = None

    def where(self) -> tuple[str, list[object]]:
        """The SQL condition and its values."""
        terms: list[tuple[str, object]] = [
            (f"{name} = ?", getattr(self, name))
            for name in ("rollout", "group_index", "sample_index", "file", "status", "fate")
            if getattr(self, name) is not None
        ]
        if self.data_set is not None:
            terms.append(("data_set = ?", self.data_set) if self.data_set else ("data_set IS NULL AND ?", True))
        if self.min_score is not None:
            terms.append(("score >= ?", self.min_score))
        if self.max_score is not None:
            terms.append(("score <= ?", self.max_score))
        if self.failed:
            terms.append(("status = ?", "failed"))
        return " AND ".join(["1", *(term for term, _ in terms)]), [value for _, value in terms]


class Index:
    """A connection; `add_file` and `drop` are the writer's."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    @classmethod
    def to_write(cls, folder: Path) -> Index:
        """The run's own, begun again where it is of another version or damaged. Raises OSError, sqlite3.Error."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / INDEX
        index = cls(sqlite3.connect(path, timeout=10, check_same_thread=False))
        try:
            usable = index.version() in (0, _VERSION)
        except sqlite3.DatabaseError:
            usable = False
        if not usable:
            index.close()
            path.unlink()
            index = cls(sqlite3.connect(path, timeout=10, check_same_thread=False))
        # What a power cut takes from the index is read again from the files.
        index._db.executescript("PRAGMA synchronous = OFF;" + _SCHEMA)
        index.refresh(folder)
        return index

    @classmethod
    def to_read(cls, folder: Path) -> Index:
        """What the run's index has, and what it lacks, in memory where anything is lacking."""
        path = folder / INDEX
        if path.is_file():
            try:
                index = cls(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10))
                if index.version() == _VERSION and not index.stale(folder):
                    return index
                memory = sqlite3.connect(":memory:")
                if index.version() == _VERSION:
                    index._db.backup(memory)
                index.close()
            except sqlite3.DatabaseError:
                memory = sqlite3.connect(":memory:")
        else:
            memory = sqlite3.connect(":memory:")
        index = cls(memory)
        memory.executescript(_SCHEMA)
        index.refresh(folder)
        return index

    def close(self) -> None:
        """End the connection."""
        self._db.close()

    def version(self) -> int:
        """Of the schema; 0 where there is none yet."""
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def files(self) -> dict[str, int]:
        """Name -> bytes of the files that are indexed."""
        return dict(self._db.execute("SELECT name, bytes FROM files"))

    def stale(self, folder: Path) -> list[str]:
        """Files that are not in the index as they lie there, and those that are gone."""
        there = {path.name: path.stat().st_size for path in sample_files(folder)}
        known = self.files()
        return sorted(name for name in there.keys() | known.keys() if there.get(name) != known.get(name))

    def refresh(self, folder: Path) -> None:
        """Bring the index up to the files."""
        for name in self.stale(folder):
            path = folder / name
            if not path.is_file():
                self.drop(name)
            else:
                self.add_file(path, list(read_frames(path)))

    def add_file(self, path: Path, frames: Sequence[tuple[Frame, Sequence[Row]]], *, thinned: bool = False) -> None:
        """Index a file's groups, in place of what was known of it."""
        found = parse_name(path.name)
        assert found is not None, "only files of samples are indexed"
        rows = [
            _values(path.name, found[0], frame, place, row)
            for frame, group in frames
            for place, row in enumerate(group)
        ]
        with self._db:
            self._drop(path.name)
            self._db.execute("INSERT INTO files VALUES (?, ?, ?)", (path.name, path.stat().st_size, thinned))
            marks = ", ".join("?" * len(_COLUMNS))
            self._db.executemany(f"INSERT INTO samples VALUES ({marks})", rows)

    def drop(self, name: str) -> None:
        """Forget a file."""
        with self._db:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._db.execute("DELETE FROM samples WHERE file = ?", (name,))
        self._db.execute("DELETE FROM files WHERE name = ?", (name,))

    def whole_files(self) -> list[str]:
        """Files that were not thinned, oldest rollout first."""
        return [
            name for (name,) in self._db.execute("SELECT name FROM files WHERE NOT thinned ORDER BY substr(name, -17)")
        ]

    def total_bytes(self) -> int:
        """Of all files."""
        return int(self._db.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()[0])

    # -- asking ------------------------------------------------------------------------------------------

    def find(self, wanted: Filter, *, order: str = "rollout", limit: int = -1, offset: int = 0) -> list[Entry]:
        """The samples that pass, in an order of `ORDERS`."""
        where, values = wanted.where()
        names = ", ".join(name for name in _COLUMNS)
        query = f"SELECT {names} FROM samples WHERE {where} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?"
        with closing(self._db.execute(query, [*values, limit, offset])) as found:
            return [Entry(*row) for row in found]

    def count(self, wanted: Filter) -> int:
        """How many pass."""
        where, values = wanted.where()
        return int(self._db.execute(f"SELECT count(*) FROM samples WHERE {where}", values).fetchone()[0])

    def rollouts(self) -> Iterator[tuple[int, int, float | None, int, int]]:
        """(rollout, samples, mean score, dropped, failed) of the training rollouts, in order."""
        yield from self._db.execute(
            "SELECT rollout, count(*), avg(CASE WHEN fate = 'trained' THEN score END), sum(fate = 'dropped'),"
            " sum(status = 'failed') FROM samples WHERE data_set IS NULL GROUP BY rollout ORDER BY rollout"
        )


def _values(file: str, rollout: int, frame: Frame, place: int, row: Row) -> tuple[object, ...]:
    kept = row.get("kept") or {}
    response, mask = row.get("response_length") or 0, row.get("loss_mask")
    versions: Iterable[int] = [v for v in row.get("token_weight_versions") or () if v is not None and v != NOT_SAMPLED]
    failure = (row.get("metadata") or {}).get("failure")
    return (
        file, rollout, kept.get("data_set"), row.get("group_index"), row.get("index"), place, *frame,
        kept.get("score"), row.get("status"), kept.get("fate", "trained"), len(row.get("tokens") or ()) - response,
        response, response if mask is None else sum(map(bool, mask)), min(versions, default=None),
        max(versions, default=None), None if not failure else f"{failure.get('where')}: {failure.get('error')}",
    )  # fmt: skip
