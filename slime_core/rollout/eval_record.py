"""Finished groups of an evaluation -> lines on disk, and back: what a resumed evaluation need not do again.

::

    RUN/eval/state.json       what is evaluated (`plan`), and whether it is finished
    RUN/eval/<name>.jsonl     one sample a line, the groups of a data set one behind the other, appended as they finish

Each group is one write, followed by fsync, so at most the last one is torn; that is cut off when the file is read. A
line is a sample for `Sample.from_dict` with two keys more: `eval_group`, its group's number in the data set, and
`eval_group_samples`, how many lines the group has. Groups stand in the order in which they finished until `finish`
writes the file anew, in the data set's order.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from slime_core.data.dataset import exact_json
from slime_core.data.dumps import to_json, write_lines
from slime_core.errors import DataError, RecordError
from slime_core.types import Group, Sample
from slime_core.waits import waiting

SCHEMA = 1
NUMBER, SIZE = "eval_group", "eval_group_samples"
_FOLDER, _STATE = "eval", "state.json"
_LOST = "What is there stays; make space, and go on with slime eval --resume"


class EvalRecord:
    """The record of one evaluation in its run directory. One process writes."""

    def __init__(self, run_dir: Path, plan: Mapping[str, Any]) -> None:
        """`plan`: what must be the same for the groups to be of use, as JSON holds it."""
        self.folder = run_dir / _FOLDER
        self.plan = dict(plan)
        self.kept = 0
        """Groups that were there when the record was opened."""
        self.done = 0
        """Groups that are there."""
        self.total = 0
        """Groups of all data sets that have been announced."""
        self._groups: dict[str, dict[int, Group]] = {}
        self._files: dict[str, IO[bytes]] = {}
        self._writing = threading.Lock()

    # -- beginning -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an empty record in a directory without one. Raises RecordError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"{self.folder} cannot be written: {error}") from error
        self._write_state(finished=False)

    def open(self, names: list[str]) -> None:
        """Go on with what is there for these data sets. Raises DataError for a damaged file, RecordError."""
        for name in names:
            path = self._path(name)
            groups, end = read_groups(path) if path.is_file() else ({}, 0)
            if path.is_file() and path.stat().st_size > end:
                os.truncate(path, end)
            self._groups[name] = groups
            self.kept += len(groups)
        self.done = self.kept

    def finished(self, name: str) -> dict[int, Group]:
        """The data set's groups that are there: number -> samples with their rewards."""
        return dict(self._groups.get(name, {}))

    # -- going on ------------------------------------------------------------------------------------

    async def add(self, name: str, number: int, group: Group) -> None:
        """Keep a finished group; it is on disk when this returns. Raises RecordError."""
        lines = b"".join(line + b"\n" for line in _lines(number, group))
        with waiting(f"{self._path(name)} on disk", deadline=None, then="the disk answers, or the write fails"):
            await asyncio.to_thread(self._append, name, lines)
        self._groups.setdefault(name, {})[number] = group
        self.done += 1

    def _append(self, name: str, lines: bytes) -> None:
        path = self._path(name)
        try:
            with self._writing:
                if name not in self._files:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._files[name] = path.open("ab")
                file = self._files[name]
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RecordError(f"{path} cannot be written: {error}. {_LOST}") from error

    def finish(self) -> None:
        """Every group is there: write the files in the data sets' order, and say so. Raises RecordError."""
        self.close()
        for name, groups in self._groups.items():
            lines = [line for number in sorted(groups) for line in _lines(number, groups[number])]
            write_lines(self._path(name), lines)
        self._write_state(finished=True)

    def close(self) -> None:
        """Close the files; safe to call twice."""
        with self._writing:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def _write_state(self, *, finished: bool) -> None:
        state = {"schema": SCHEMA, "finished": finished, "plan": self.plan}
        write_lines(self.folder / _STATE, [json.dumps(state, indent=2).encode()])


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """`finished` and `plan` of the record in a run directory; None without one. Raises DataError."""
    path = run_dir / _FOLDER / _STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise DataError(f"{path}: not the record of an evaluation of this version of slime (schema {SCHEMA})")
    return state


def read_groups(path: Path) -> tuple[dict[int, Group], int]:
    """The complete groups of a file, and the byte where the last of them ends; what follows was torn.

    Raises:
        DataError: A line before the last is damaged, or it is no such file.
    """
    groups: dict[int, Group] = {}
    end, members, size = 0, [], 0
    data = path.read_bytes()
    rows = data.split(b"\n")
    offset = 0
    for place, row in enumerate(rows[:-1], start=1):  # what follows the last newline is torn, or empty
        offset += len(row) + 1
        try:
            values = exact_json(row)
            number, size = int(values.pop(NUMBER)), int(values.pop(SIZE))
            members.append(Sample.from_dict(values))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{path}:{place}: no line of an evaluation: {reason}. Use --overwrite") from error
        if len(members) == size:
            groups[number], members, end = members, [], offset
    return groups, end


def _lines(number: int, group: Group) -> list[bytes]:
    return [to_json({**s.to_dict(), NUMBER: number, SIZE: len(group)}, f"sample {s.index}") for s in group]
