"""The index of stored samples: every file describes its samples in a footer, and readers combine the footers.

The run writes no separate index, so the index cannot be out of date, and a filter over a run reads no sample. A file
without a footer of this version is read as a whole. In memory a sample takes about 100 bytes.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson

from slime_core.sample import SampleStatus
from slime_core.sample.provenance import NOT_SAMPLED
from slime_runs.files import (
    MOST_PARSED,
    Frame,
    Row,
    file_name,
    numbered,
    parse_name,
    parsed_size,
    read_footer,
    read_frames,
    write_file,
)

logger = logging.getLogger(__name__)

Order = Literal["rollout", "best", "worst", "file"]
"""Orders of samples; "rollout" is newest first. Samples without a score are last in "best" and "worst"."""
Key = tuple[int, int]
"""Index of a sample (-1: no index), and its part."""
Array = np.ndarray[Any, np.dtype[Any]]

_TEXTS = ("data_set", "status", "fate", "failure")
"""Columns that hold positions in a list of texts: -1 means no text, and `_UNKNOWN` is a text that no sample has."""
_UNKNOWN = -2
_CODES: dict[str | None, int] = {None: -1} | {
    text: code for code, text in enumerate((*SampleStatus, "trained", "dropped", "evaluated"))
}
"""Every list of texts begins with these, so most files share the positions."""
_NUMBERS = ("group_index", "sample_index", "oldest_version", "newest_version", "data_row")
"""Columns in which `_NONE` stands for None."""
_NONE = int(np.iinfo(np.int64).min)
_COUNTED = {"trained": "fate", "evaluated": "fate", "dropped": "fate", "failed": "status", "truncated": "status"}
_COUNTS = ("place", "prompt_tokens", "response_tokens", "trained_tokens", "part")
_SAMPLE = np.dtype(
    [
        *((name, "<i8") for name in ("offset", "size", *_NUMBERS)),
        ("score", "<f8"),
        *((name, "<i4") for name in (*_COUNTS, *_TEXTS)),
    ]
)
_FORM = 1
"""Format number of footers: a line of JSON, then a `_SAMPLE` per sample. Other columns need a new number."""
_NO_VERSION = frozenset({None, NOT_SAMPLED})
UNLIKE = (AttributeError, OverflowError, TypeError, ValueError)
"""Errors that `Facts` raises for rows that are no samples."""


class Entry(NamedTuple):
    """The index entry of a sample."""

    rollout: int
    """Rollout id, counted from 0; for an evaluation, the number of rollouts trained on before it."""
    data_set: str | None
    """Data set of an evaluation; None in training."""
    group_index: int | None
    sample_index: int | None
    place: int
    """Position in its group's frame."""
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
    """Row of the training data with its prompt."""
    part: int
    """Number among the samples of one execution (fan-out), which have the same `sample_index`; counted from 0."""

    @property
    def key(self) -> Key:
        """Key of the sample in `Run.trained` and `Run.shadow`."""
        return -1 if self.sample_index is None else self.sample_index, self.part

    @property
    def file(self) -> str:
        """Name of the sample's file."""
        return file_name(self.rollout, evaluation=self.data_set is not None)

    @property
    def frame(self) -> Frame:
        """Offset and size of the sample's group in the file."""
        return Frame(self.offset, self.size)


class Total(NamedTuple):
    """Totals of a rollout, or of one data set of an evaluation."""

    rollout: int
    data_set: str | None
    samples: int
    score: float | None
    """Mean score; for a rollout, over the samples that were trained on."""
    dropped: int
    failed: int
    truncated: int
    tokens: int
    """Number of tokens of all responses."""


@dataclass(frozen=True)
class Filter:
    """Conditions on samples; None matches every sample."""

    rollout: int | None = None
    data_set: str | None = None
    """Name of an evaluation's data set; "" for training only."""
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
    """Minimum number of response tokens."""
    max_tokens: int | None = None

    def files(self) -> tuple[str, ...] | None:
        """Return the names of the files that may hold matching samples; None means all files."""
        if self.file is not None:
            return (self.file,)
        if self.rollout is None:
            return None
        return file_name(self.rollout), file_name(self.rollout, evaluation=True)

    def passes(self, rows: Mapping[str, Array], codes: Mapping[str | None, int]) -> Iterator[Array]:
        """Yield a mask of matching samples for each condition except `rollout` and `file`."""
        for name in ("group_index", "sample_index", "part", "data_row"):
            if (number := getattr(self, name)) is not None:
                yield rows[name] == number
        for name in _TEXTS[:3]:
            if (text := getattr(self, name)) is not None:
                yield rows[name] == codes.get(text or None, _UNKNOWN)
        bounds = {"score": (self.min_score, self.max_score), "response_tokens": (self.min_tokens, self.max_tokens)}
        for name, (least, most) in bounds.items():
            if least is not None:
                yield rows[name] >= least
            if most is not None:
                yield rows[name] <= most


class Facts:
    """The facts about the samples in a file's frames, before the positions of the frames are known."""

    def __init__(self, frames: Iterable[Sequence[Row]]) -> None:
        """Read the frames one after another. Raises one of `UNLIKE`."""
        parts = [_columns(frame) for frame in frames]
        lengths = [len(part["place"]) for part in parts]
        codes, samples = _CODES.copy(), np.zeros(sum(lengths), _SAMPLE)
        for name in parts[0] if parts else ():
            values = list(itertools.chain.from_iterable(part[name] for part in parts))
            if name in _TEXTS:
                values = [codes.setdefault(text, len(codes) - 1) for text in values]
            elif name in _NUMBERS:
                values = [_NONE if number is None else number for number in values]
            samples[name] = values
        self.texts = [text for text in codes if text is not None]
        order = np.lexsort((samples["sample_index"], samples["group_index"], samples["data_set"]))
        self.samples = samples[order]
        """Samples in the order of data set, group and sample."""
        self._frames = np.repeat(np.arange(len(parts)), lengths)[order]

    def lie_in(self, frames: Sequence[Frame]) -> None:
        """Set the positions of the frames in the file."""
        places = np.array(frames, np.int64).reshape(-1, 2)[self._frames]
        self.samples["offset"], self.samples["size"] = places.T

    def write(self, path: Path, content: Iterable[bytes], *, thinned: bool = False) -> None:
        """Write the file from each frame's JSON lines. Raises OSError, which leaves the file unchanged."""

        def footer(frames: Sequence[Frame]) -> bytes:
            self.lie_in(frames)
            head = {"form": _FORM, "thinned": thinned, "texts": self.texts}
            return orjson.dumps(head) + b"\n" + self.samples.tobytes()

        write_file(path, content, footer)


def _columns(rows: Sequence[Row]) -> dict[str, Sequence[Any]]:
    kept = [row.get("kept") or {} for row in rows]
    lengths = [row.get("response_length") or 0 for row in rows]
    masks = [row.get("loss_mask") for row in rows]
    versions = [set(row.get("token_weight_versions") or ()) - _NO_VERSION for row in rows]
    failures = [(row.get("metadata") or {}).get("failure") for row in rows]
    return {
        "place": range(len(rows)),
        "group_index": [row.get("group_index") for row in rows],
        "sample_index": [row.get("index") for row in rows],
        "data_row": [row.get("row") for row in rows],
        "oldest_version": [min(found, default=None) for found in versions],
        "newest_version": [max(found, default=None) for found in versions],
        "score": [np.nan if (score := one.get("score")) is None else score for one in kept],
        "prompt_tokens": [len(row.get("tokens") or ()) - length for row, length in zip(rows, lengths)],
        "response_tokens": lengths,
        "trained_tokens": [n if mask is None else len(mask) - mask.count(0) for n, mask in zip(lengths, masks)],
        "part": [one.get("part", 0) for one in kept],
        "data_set": [one.get("data_set") for one in kept],
        "status": [row.get("status") for row in rows],
        "fate": [one.get("fate", "trained") for one in kept],
        "failure": [f"{found.get('where')}: {found.get('error')}" if found else None for found in failures],
    }


def _known(path: Path) -> tuple[dict[str, Any], Array] | None:
    """Return the footer, or None if the file has no footer of this format. Raises OSError."""
    head, _, samples = read_footer(path).partition(b"\n")
    try:
        said: dict[str, Any] = orjson.loads(head) if parsed_size(head) <= MOST_PARSED else {"form": None}
        if said["form"] != _FORM:
            return None
        found = np.frombuffer(samples, _SAMPLE)
        codes = np.array([found[name] for name in _TEXTS])
        return (said, found) if ((codes >= -1) & (codes < len(said["texts"]))).all() else None
    except (KeyError, TypeError, ValueError):  # no footer, or a footer of another program
        return None


def is_thinned(path: Path) -> bool:
    """Return whether samples of the file have been deleted. Raises OSError."""
    known = _known(path)
    return known is not None and bool(known[0].get("thinned"))


def _read(path: Path) -> tuple[list[str], Array]:
    """Return the texts and the samples of a file; a file that cannot be read gives none."""
    try:
        if (known := _known(path)) is not None:
            return known[0]["texts"], known[1]
        frames = list[Frame]()
        facts = Facts(_noted(read_frames(path), frames))
        facts.lie_in(frames)
    except FileNotFoundError:  # thinned away just now
        return [], np.zeros(0, _SAMPLE)
    except (OSError, *UNLIKE) as error:
        logger.warning("%s: left out, as it cannot be read: %s: %s", path, type(error).__name__, error)
        return [], np.zeros(0, _SAMPLE)
    return facts.texts, facts.samples


def _noted(read: Iterable[tuple[Frame, list[Row]]], frames: list[Frame]) -> Iterator[list[Row]]:
    """Yield the rows of each frame, and append the frame's position to `frames`."""
    for frame, rows in read:
        frames.append(frame)
        yield numbered(rows)


class Index:
    """The index of a folder's files; `update` reads new and changed footers, and drops deleted files."""

    def __init__(self, folder: Path, names: tuple[str, ...] | None = None) -> None:
        """Index all files of the folder, or only the files `names`."""
        self._folder, self._names = folder, names
        self._rows = np.zeros(0, _SAMPLE)
        """Samples, newest rollout first; within a file in the order of data set, group and sample."""
        self._places: dict[str, tuple[int, int]] = {}
        """Name of a file -> (start, end) of its samples in `_rows`, in the same order."""
        self._rollouts: list[int] = []
        """Rollouts of these files."""
        self._stamps: dict[str, tuple[int, int]] = {}
        self._codes = _CODES.copy()
        self._totals: list[Total] | None = None
        """Cached totals, cleared by an update."""
        self.update()

    def update(self) -> None:
        """Update the index from the files."""
        before, now = self._stamps, _stamps(self._folder, self._names)
        parts = {n: self._rows[a:b] for n, (a, b) in self._places.items() if before[n] == now.get(n)}
        for name in now.keys() - parts.keys():
            parts[name] = self._in_own_codes(*_read(self._folder / name))
        # An evaluation after so many rollouts was before the rollout of that number.
        names = sorted(parts, key=lambda name: (_parsed(name)[0], not _parsed(name)[1]), reverse=True)
        ends = [0, *itertools.accumulate(len(parts[name]) for name in names)]
        self._rows = np.frombuffer(b"".join(parts[name].data for name in names), _SAMPLE)
        self._places, self._stamps = dict(zip(names, itertools.pairwise(ends))), now
        self._columns = {n: self._rows[n] for n in _SAMPLE.names or ()}
        self._columns |= {n: self._columns[n].copy() for n in ("score", *_TEXTS[:3])}  # contiguous, for speed
        self._rollouts, self._totals = [_parsed(name)[0] for name in names], None

    def _in_own_codes(self, texts: Sequence[str], samples: Array) -> Array:
        codes = [*(self._codes.setdefault(text, len(self._codes) - 1) for text in texts), -1]
        if codes != [*range(len(texts)), -1]:
            samples, places = samples.copy(), np.array(codes, np.int32)
            for name in _TEXTS:
                samples[name] = places[samples[name]]
        return samples

    def size(self) -> int:
        """Return the number of samples."""
        return len(self._rows)

    def total_bytes(self) -> int:
        """Return the size of all files in bytes."""
        return sum(size for _, size in self._stamps.values())

    # -- asking ------------------------------------------------------------------------------------------

    def find(self, wanted: Filter, *, order: Order = "rollout", limit: int = -1) -> list[Entry]:
        """Return the samples that match, at most `limit` unless `limit` is negative."""
        at = self._passing(wanted)
        if order == "file":
            rows = self._rows[at]
            at = at[np.lexsort((rows["place"], rows["offset"], -self._files_of(at)))]
        elif order != "rollout":
            scores = self._columns["score"][at] * (-1.0 if order == "best" else 1.0)  # NaN, no score, is sorted last
            if 0 < limit < len(at):
                last = np.partition(scores, limit - 1)[limit - 1]
                first = np.isnan(last) | (scores <= last)
                at, scores = at[first], scores[first]
            at = at[np.argsort(scores, kind="stable")]
        return self._entries(at if limit < 0 else at[:limit])

    def _passing(self, wanted: Filter) -> Array:
        """Return the positions of matching samples, newest first."""
        places = [self._places[name] for name in wanted.files() or self._places if name in self._places]
        start, end = (places[0][0], places[-1][1]) if places else (0, 0)
        rows = {name: column[start:end] for name, column in self._columns.items()}
        passing = np.ones(end - start, bool)
        for term in wanted.passes(rows, self._codes):
            passing &= term
        return np.flatnonzero(passing) + start

    def _files_of(self, at: Array) -> Array:
        """Return the number of each sample's file, in the order of `_places`."""
        return np.searchsorted([end for _, end in self._places.values()], at, side="right")

    def _entries(self, at: Array) -> list[Entry]:
        return list(map(Entry, *(self._column(name, at) for name in Entry._fields)))

    def _column(self, name: str, at: Array) -> list[Any]:
        """Return a field of the entries at the positions `at`."""
        if name == "rollout":
            return [self._rollouts[file] for file in self._files_of(at).tolist()]
        values = self._rows[name][at].tolist()
        if name == "score":
            return [None if math.isnan(score) else score for score in values]
        if name in _TEXTS:
            texts = {code: text for text, code in self._codes.items()}
            return [texts[code] for code in values]
        return [None if number == _NONE else number for number in values] if name in _NUMBERS else values

    def rollouts(self) -> list[Total]:
        """Return totals of the training rollouts, in order."""
        return self._all_totals(evaluation=False)

    def evaluations(self) -> list[Total]:
        """Return totals of the data sets of all evaluations, in order."""
        return self._all_totals(evaluation=True)

    def _all_totals(self, *, evaluation: bool) -> list[Total]:
        if self._totals is None:
            self._totals = sorted(self._add_up(), key=lambda total: (total.rollout, total.data_set or ""))
        return [total for total in self._totals if (total.data_set is not None) == evaluation]

    def _add_up(self) -> Iterator[Total]:
        column = self._columns
        files = np.repeat(np.arange(len(self._places)), [end - start for start, end in self._places.values()])
        starts = _starts(files, column["data_set"])
        is_of = {text: column[name] == _CODES[text] for text, name in _COUNTED.items()}
        paid = ~np.isnan(column["score"]) & (is_of["trained"] | is_of["evaluated"])
        counted = (paid, is_of["dropped"], is_of["failed"], is_of["truncated"], column["response_tokens"])
        scored, *counts = (np.add.reduceat(one, starts, dtype=np.int64).tolist() for one in counted)
        scores = np.add.reduceat(np.where(paid, column["score"], 0.0), starts).tolist()
        means = [score / count if count else None for score, count in zip(scores, scored)]
        sizes = np.diff(starts, append=len(self._rows)).tolist()
        numbers, sets = (self._column(name, starts) for name in ("rollout", "data_set"))
        yield from map(Total, numbers, sets, sizes, means, *counts)

    def scores(self, data_set: str, *, limit: int) -> list[tuple[int, int | None, int | None, float | None]]:
        """Return (rollout, item, its first sample, mean score) for a data set, newest evaluation first."""
        at = self._passing(Filter(data_set=data_set))
        if not len(at):
            return []
        rows, files = self._rows[at], self._files_of(at)
        starts = _starts(files, rows["group_index"], np.where(rows["group_index"] == _NONE, rows["sample_index"], 0))
        known = ~np.isnan(rows["score"])
        counts = np.add.reduceat(known, starts, dtype=np.int64).tolist()
        scores = np.add.reduceat(np.where(known, rows["score"], 0.0), starts).tolist()
        firsts = at[starts[:limit]]
        numbers, groups, samples = (self._column(name, firsts) for name in ("rollout", "group_index", "sample_index"))
        return [
            (number, sample if group is None else group, sample, score / count if count else None)
            for number, group, sample, score, count in zip(numbers, groups, samples, scores, counts)
        ]


def _starts(*columns: Array) -> Array:
    """Return the positions at which a column's value changes, including 0."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(new)


def _parsed(name: str) -> tuple[int, bool]:
    found = parse_name(name)
    assert found is not None, "only files of samples are indexed"
    return found


def _stamps(folder: Path, names: tuple[str, ...] | None) -> dict[str, tuple[int, int]]:
    """Return name -> (modification time in ns, bytes) of the sample files."""
    try:
        with os.scandir(folder) as entries:
            wanted = [e for e in entries if parse_name(e.name) and e.name in (names or (e.name,))]
            found = [(e.name, e.stat(follow_symlinks=False)) for e in wanted]
    except FileNotFoundError:
        return {}
    return {name: (state.st_mtime_ns, state.st_size) for name, state in found}
