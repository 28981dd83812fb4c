"""The index of stored samples: SQLite, so that a filter over a run opens no file; what is in it can be made again.

The writer keeps `samples/index.sqlite`. A reader never writes into a run: what the index lacks (a run that was copied
without it, one whose writer died between file and index) it adds to a copy in memory.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slime_core.provenance import NOT_SAMPLED
from slime_runs.files import INDEX, Frame, Row, file_name, numbered, parse_name, read_frames

_COLUMNS = (
    "rollout", "data_set", "group_index", "sample_index", "place", "offset", "size", "score", "status", "fate",
    "prompt_tokens", "response_tokens", "trained_tokens", "oldest_version", "newest_version", "failure", "data_row",
    "part",
)  # fmt: skip
_PLACE = ("rollout", "place", "offset", "size")
_FACTS = tuple(name for name in _COLUMNS if name not in _PLACE)
_TOTALS = ("rollout", "data_set", "samples", "scored", "score", "dropped", "failed", "truncated", "tokens")
_COUNTED = ("dropped", "failed", "truncated")
"""Status or fate whose samples `totals` counts, so that rollouts without any are not searched."""
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, thinned INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS samples ({", ".join(_COLUMNS)});
CREATE TABLE IF NOT EXISTS totals ({", ".join(_TOTALS)});
CREATE INDEX IF NOT EXISTS of_rollout ON samples (data_set, rollout, group_index, sample_index);
CREATE INDEX IF NOT EXISTS of_best ON samples (data_set, score DESC, rollout DESC);
CREATE INDEX IF NOT EXISTS of_worst ON samples (data_set, score, rollout DESC);
CREATE INDEX IF NOT EXISTS of_group ON samples (group_index);
CREATE INDEX IF NOT EXISTS of_row ON samples (data_row);
PRAGMA user_version = 4;
"""
_VERSION = 4

ORDERS = {
    "rollout": ("rollout DESC, group_index, sample_index", ""),
    "best": ("score DESC, rollout DESC", ""),
    # SQL sorts what has no score first; both halves are in the order of an index.
    "worst": ("score, rollout DESC", "score IS NOT NULL"),
    "file": ("rowid", ""),
}
"""Name -> order, and the condition on those that come first."""
Key = tuple[int, int]
"""Index of a sample (-1: it has none), and its part."""
_NO_VERSION = frozenset({None, NOT_SAMPLED})
Facts = tuple[object, ...]
"""What is known of a sample wherever it lies: `_FACTS`."""
_CLOCK_STEPS = 2000
"""Steps of SQLite's machine between two looks at the clock."""


@dataclass(frozen=True)
class Entry:
    """What the index knows of a sample."""

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
    data_row: int | None
    """Row of the training data that its prompt is."""
    part: int
    """Of several samples that one execution became (fan-out), which have the same `sample_index`; 0 is the first."""

    @property
    def key(self) -> Key:
        """By which `Run.trained` and `Run.shadow` know it."""
        return -1 if self.sample_index is None else self.sample_index, self.part

    @property
    def file(self) -> str:
        """Name of the file it is in."""
        return file_name(self.rollout, evaluation=self.data_set is not None)

    @property
    def frame(self) -> Frame:
        """Where its group lies in the file."""
        return Frame(self.offset, self.size)


class Total(NamedTuple):
    """What a rollout, or one data set of an evaluation, adds up to."""

    rollout: int
    data_set: str | None
    samples: int
    score: float | None
    """Mean; of a rollout over what was trained on."""
    dropped: int
    failed: int
    truncated: int
    tokens: int
    """Of all responses."""


@dataclass(frozen=True)
class Filter:
    """Which samples; None is any."""

    rollout: int | None = None
    data_set: str | None = None
    """Name of an evaluation's data set, "" for training alone."""
    group_index: int | None = None
    sample_index: int | None = None
    part: int | None = None
    data_row: int | None = None
    file: str | None = None
    status: str | None = None
    fate: str | None = None
    min_score: float | None = None
    max_score: float | None = None
    min_tokens: int | None = None
    """Of the response."""
    max_tokens: int | None = None

    def where(self) -> tuple[str, list[object]]:
        """The SQL condition and its values."""
        terms: list[tuple[str, object]] = [
            (f"{name} = ?", getattr(self, name))
            for name in ("rollout", "group_index", "sample_index", "part", "data_row", "status", "fate")
            if getattr(self, name) is not None
        ]
        if self.file is not None:
            rollout, evaluation = _parsed(self.file)
            terms.append((f"data_set IS {'NOT ' if evaluation else ''}NULL AND rollout = ?", rollout))
        if self.data_set is not None:
            terms.append(("data_set = ?", self.data_set) if self.data_set else ("data_set IS NULL AND ?", True))
        bounds = {"score >= ?": self.min_score, "score <= ?": self.max_score}
        bounds |= {"response_tokens >= ?": self.min_tokens, "response_tokens <= ?": self.max_tokens}
        terms += [(term, value) for term, value in bounds.items() if value is not None]
        counted = [
            f"rollout IN (SELECT rollout FROM totals WHERE {n})" for n in (self.status, self.fate) if n in _COUNTED
        ]
        return " AND ".join(["1", *counted, *(term for term, _ in terms)]), [value for _, value in terms]


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
        if not index._usable():
            index.close()
            path.unlink()
            index = cls(sqlite3.connect(path, timeout=10, check_same_thread=False))
        # What a power cut takes from the index is read again from the files. A journal that stays saves making one.
        index._db.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = PERSIST;" + _SCHEMA)
        index.refresh(folder)
        return index

    @classmethod
    def to_read(cls, folder: Path, *, writer_works: bool = False) -> Index:
        """What the run's index has, and what it lacks, in memory where anything is lacking.

        Args:
            folder: Of the samples.
            writer_works: The run goes on, so what its index lacks will be there in a moment: take it as it is.
        """
        path, memory = folder / INDEX, _in_memory()
        if path.is_file():
            try:
                index = cls(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10, check_same_thread=False))
                usable = index.version() == _VERSION
                if usable and (writer_works or not index.stale(folder)):
                    return index
                if usable:
                    index._db.backup(memory)
                index.close()
            except sqlite3.DatabaseError:
                memory = _in_memory()
        index = cls(memory)
        memory.executescript(_SCHEMA)
        index.refresh(folder)
        return index

    def close(self, *, one_file: bool = False) -> None:
        """End the connection; with `one_file`, the writer's, no journal stays beside it."""
        if one_file:
            self._db.execute("PRAGMA journal_mode = DELETE")
        self._db.close()

    def version(self) -> int:
        """Of the schema; 0 where there is none yet."""
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _usable(self) -> bool:
        """Whether it is whole, and of this version or new. Raises sqlite3.OperationalError: full, locked."""
        try:
            return self.version() in (0, _VERSION) and self._db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            return False

    def files(self) -> dict[str, int]:
        """Name -> bytes of the files that are indexed."""
        return dict(self._db.execute("SELECT name, bytes FROM files"))

    def stale(self, folder: Path) -> list[str]:
        """Files that are not in the index as they lie there, and those that are gone."""
        there = _sizes(folder)
        known = self.files()
        return sorted(name for name in there.keys() | known.keys() if there.get(name) != known.get(name))

    def refresh(self, folder: Path) -> None:
        """Bring the index up to the files."""
        for name in self.stale(folder):
            path = folder / name
            if not path.is_file():
                self.drop(name)
            else:
                self.add_file(
                    path, ((frame, [facts(row) for row in numbered(rows)]) for frame, rows in read_frames(path))
                )

    def add_file(self, path: Path, frames: Iterable[tuple[Frame, Sequence[Facts]]], *, thinned: bool = False) -> None:
        """Index a file's groups, in place of what was known of it."""
        rollout, _ = _parsed(path.name)
        rows = [(rollout, place, *frame, *sample) for frame, group in frames for place, sample in enumerate(group)]
        with self._db:
            self._drop(path.name)
            self._db.execute("INSERT INTO files VALUES (?, ?, ?)", (path.name, path.stat().st_size, thinned))
            names, marks = ", ".join((*_PLACE, *_FACTS)), ", ".join("?" * len(_COLUMNS))
            before = self._db.execute("SELECT max(rowid) FROM samples").fetchone()[0] or 0
            self._db.executemany(f"INSERT INTO samples ({names}) VALUES ({marks})", rows)
            self._db.execute(_ADD_UP, (before,))

    def drop(self, name: str) -> None:
        """Forget a file."""
        with self._db:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if not self._db.execute("DELETE FROM files WHERE name = ?", (name,)).rowcount:
            return
        rollout, evaluation = _parsed(name)
        which = f"rollout = ? AND data_set IS {'NOT ' if evaluation else ''}NULL"
        for (data_set,) in self._db.execute(f"SELECT data_set FROM totals WHERE {which}", (rollout,)).fetchall():
            self._db.execute("DELETE FROM samples WHERE data_set IS ? AND rollout = ?", (data_set, rollout))
        self._db.execute(f"DELETE FROM totals WHERE {which}", (rollout,))

    def whole_files(self) -> list[str]:
        """Files that were not thinned, oldest rollout first."""
        return [
            name for (name,) in self._db.execute("SELECT name FROM files WHERE NOT thinned ORDER BY substr(name, -17)")
        ]

    def total_bytes(self) -> int:
        """Of all files."""
        return int(self._db.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()[0])

    # -- asking ------------------------------------------------------------------------------------------

    def find(
        self, wanted: Filter, *, order: str = "rollout", limit: int = -1, within: float | None = None
    ) -> list[Entry]:
        """The samples that pass, in an order of `ORDERS`; those that were found `within` so many seconds."""
        ordered, first = ORDERS[order]
        until = None if within is None else time.monotonic() + within
        found: list[Entry] = []
        for condition in (first, f"NOT ({first})") if first else ("1",):
            left = limit - len(found) if limit >= 0 else limit
            found += self._ask(wanted, f"{condition} ORDER BY {ordered}", left, until)
        return found

    def _ask(self, wanted: Filter, rest: str, limit: int, until: float | None) -> list[Entry]:
        where, values = wanted.where()
        query = f"SELECT {', '.join(_COLUMNS)} FROM samples WHERE {where} AND {rest} LIMIT ?"
        found: list[Entry] = []
        if until is not None:
            self._db.set_progress_handler(lambda: time.monotonic() > until, _CLOCK_STEPS)
        try:
            with closing(self._db.execute(query, [*values, limit])) as rows:
                found.extend(Entry(*row) for row in rows)
        except sqlite3.OperationalError:
            if until is None or time.monotonic() <= until:
                raise
        finally:
            self._db.set_progress_handler(None, 0)
        return found

    def size(self) -> int:
        """How many samples there are."""
        return int(self._db.execute("SELECT coalesce(sum(samples), 0) FROM totals").fetchone()[0])

    def rollouts(self) -> list[Total]:
        """The training rollouts, in order."""
        return self._totals("data_set IS NULL")

    def evaluations(self) -> list[Total]:
        """The data sets of all evaluations, in order."""
        return self._totals("data_set IS NOT NULL")

    def _totals(self, which: str) -> list[Total]:
        names = "rollout, data_set, samples, score / scored, dropped, failed, truncated, tokens"
        rows = self._db.execute(f"SELECT {names} FROM totals WHERE {which} ORDER BY rollout, data_set")
        return [Total(*row) for row in rows]

    def scores(self, data_set: str, *, limit: int) -> list[tuple[int, int | None, int | None, float | None]]:
        """(rollout, item, its first sample, mean score) of an evaluation's data set, newest evaluation first."""
        return self._db.execute(
            "SELECT rollout, coalesce(group_index, sample_index), min(sample_index), avg(score) FROM samples"
            " WHERE data_set = ? GROUP BY rollout, group_index, CASE WHEN group_index IS NULL THEN sample_index END"
            " ORDER BY rollout DESC LIMIT ?",
            (data_set, limit),
        ).fetchall()


_PAID = "CASE WHEN fate IN ('trained', 'evaluated') THEN score END"
_ADD_UP = f"""
INSERT INTO totals SELECT rollout, data_set, count(*), count({_PAID}), sum({_PAID}),
    sum(fate = 'dropped'), sum(status = 'failed'), sum(status = 'truncated'), sum(response_tokens)
FROM samples WHERE rowid > ? GROUP BY rollout, data_set"""


def _parsed(name: str) -> tuple[int, bool]:
    found = parse_name(name)
    assert found is not None, "only files of samples are indexed"
    return found


def _in_memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", check_same_thread=False)


def _sizes(folder: Path) -> dict[str, int]:
    """Name -> bytes of the files of samples."""
    try:
        with os.scandir(folder) as entries:
            return {e.name: e.stat().st_size for e in entries if parse_name(e.name) is not None}
    except FileNotFoundError:
        return {}


def facts(row: Row) -> Facts:
    """Of a sample as a file has it."""
    kept = row.get("kept") or {}
    response, mask = row.get("response_length") or 0, row.get("loss_mask")
    versions: set[Any] = set(row.get("token_weight_versions") or ()) - _NO_VERSION
    failure = (row.get("metadata") or {}).get("failure")
    return (
        kept.get("data_set"), row.get("group_index"), row.get("index"), kept.get("score"), row.get("status"),
        kept.get("fate", "trained"), len(row.get("tokens") or ()) - response, response,
        response if mask is None else len(mask) - mask.count(0), min(versions, default=None),
        max(versions, default=None), None if not failure else f"{failure.get('where')}: {failure.get('error')}",
        row.get("row"), kept.get("part", 0),
    )  # fmt: skip
