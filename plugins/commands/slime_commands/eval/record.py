"""Write and read the finished groups of an evaluation, so that a resumed evaluation does not repeat them.

::

    RUN/eval/state.json       what is evaluated (`plan`), and whether it is finished
    RUN/eval/<name>.jsonl     one sample a line, the groups of a data set one behind the other, appended as they finish

Each group is one write, followed by fsync, so at most the last group is torn; the reader cuts a torn group off. A line
is a sample for `Sample.from_dict` with two more keys: `eval_group`, its group's number in the data set, and
`eval_group_samples`, the number of lines of the group. Groups are in the order in which they finished until `finish`
rewrites the file in the data set's order.
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
from slime_core.sample import Group, Sample
from slime_core.waits import waiting

SCHEMA = 1
NUMBER, SIZE = "eval_group", "eval_group_samples"
_FOLDER, _STATE = "eval", "state.json"
_LOST = "What is there stays; make space, and go on with slime eval --resume"


class EvalRecord:
    """The record of an evaluation in its run directory. Only one process writes it."""

    def __init__(self, run_dir: Path, plan: Mapping[str, Any]) -> None:
        """Create the record. `plan`: JSON values that must be equal for the stored groups to be usable."""
        self.folder = run_dir / _FOLDER
        self.plan = dict(plan)
        self.kept = 0
        """Number of groups that existed when the record was opened."""
        self.done = 0
        """Number of recorded groups."""
        self.total = 0
        """Number of groups of all announced data sets."""
        self._groups: dict[str, dict[int, Group]] = {}
        self._files: dict[str, IO[bytes]] = {}
        self._writing = threading.Lock()

    # -- beginning -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an empty record in a directory that has none. Raises RecordError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"{self.folder} cannot be written: {error}") from error
        self._write_state(finished=False)

    def open(self, names: list[str]) -> None:
        """Resume from the recorded groups of these data sets. Raises DataError for a damaged file, RecordError."""
        for name in names:
            path = self._path(name)
            groups, end = read_groups(path) if path.is_file() else ({}, 0)
            if path.is_file() and path.stat().st_size > end:
                os.truncate(path, end)
            self._groups[name] = groups
            self.kept += len(groups)
        self.done = self.kept

    def finished(self, name: str) -> dict[int, Group]:
        """Return the data set's recorded groups by number; the samples have their rewards."""
        return dict(self._groups.get(name, {}))

    # -- going on ------------------------------------------------------------------------------------

    async def add(self, name: str, number: int, group: Group) -> None:
        """Record a finished group; it is on disk when this returns. Raises RecordError."""
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
        """Write the files in the data sets' order and mark the record as finished, once all groups are recorded.

        Raises RecordError.
        """
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
    """Return `finished` and `plan` of the record in a run directory; None if there is no record. Raises DataError."""
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
    """Return the complete groups of a file, and the byte at which the last ends; any text after it is torn.

    Raises:
        DataError: A line before the last is damaged, or the file is not an evaluation record.
    """
    groups: dict[int, Group] = {}
    end, members, size = 0, [], 0
    data = path.read_bytes()
    rows = data.split(b"\n")
    offset = 0
    for place, row in enumerate(rows[:-1], start=1):  # the part after the last newline is torn, or empty
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
