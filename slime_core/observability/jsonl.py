"""Write `metrics.jsonl` in the run directory: one line per rollout, always on.

On resume the lines after the checkpoint are cut off, so the file reads as if the run had never been interrupted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from slime_core.errors import CheckpointError, RecordError
from slime_core.plugins.hookspecs import hookimpl
from slime_core.protocols import Args

FILE = "metrics.jsonl"


class JsonlTracker:
    """A tracker that appends metrics as JSON lines."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._goes_on = False
        self._written, self._known = hashlib.blake2b(digest_size=16), 0
        """Hash and count of the file's first `_known` bytes, which later commits do not read again."""

    @hookimpl
    def slime_run_start(self, args: Args, run_dir: Path) -> None:
        """Open the file. A resumed run keeps all complete lines until `cut_after`: the resume may still fail."""
        path = run_dir / FILE
        content = path.read_bytes() if args.start_rollout_id and path.is_file() else b""
        self._goes_on = bool(content)
        partial = path.with_name(f".{FILE}.partial")
        partial.write_bytes(content[: content.rfind(b"\n") + 1])  # without a last line that a kill cut
        os.replace(partial, path)
        # Not buffered: a failed write must not be repeated when the file is closed.
        self._file = path.open("ab", buffering=0)

    @hookimpl
    def slime_log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; `step` counts finished rollouts."""
        if self._file is not None:
            _append(self._file, orjson.dumps({"step": step, **metrics}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    @hookimpl
    def slime_save_state(self) -> dict[str, Any]:
        """Return size and hash of the file up to the commit, so that damage can be detected."""
        if self._file is None:
            return {}
        with Path(str(self._file.name)).open("rb") as file:
            file.seek(self._known)
            self._written.update(file.read())
            self._known = file.tell()
        os.fsync(self._file.fileno())
        return {FILE: {"size": self._known, "blake2b": self._written.hexdigest()}}

    @hookimpl
    def slime_load_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the run's file differs from the commit's record."""
        known = state.get(FILE)
        if known is None or not self._goes_on or self._file is None:
            return
        path = Path(str(self._file.name))
        content = path.read_bytes()[: known["size"]]
        if hashlib.blake2b(content, digest_size=16).hexdigest() != known["blake2b"]:
            raise CheckpointError(
                f"{path}: damaged: it is not what the run had recorded by that commit. To go on without the metrics so"
                f" far: mv {path} {path}.damaged"
            )

    @hookimpl
    def slime_run_end(self, error: BaseException | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _append(file: FileIO, line: bytes) -> None:
    """Append one line. Raises RecordError if the disk is full or the file has been deleted."""
    try:
        written = file.write(line)
    except OSError as error:
        raise RecordError(f"{file.name} cannot be written: {error}. Checkpoints are intact: make space") from error
    if written != len(line):
        raise RecordError(f"{file.name}: no space for a step's metrics. Checkpoints are intact: make space")
    if os.fstat(file.fileno()).st_nlink == 0:
        raise RecordError(
            f"{file.name} has been removed while the run wrote to it. What is left of its directory can be gone on with"
            " by --load, if there are commits; else start again"
        )


def cut_after(run_dir: Path, step: int, unfinished: Collection[int] = ()) -> None:
    """Cut off the lines after `step` finished rollouts. A tracker that has the file open appends after the cut.

    Args:
        run_dir: Directory of the run.
        step: Step from which the run resumes.
        unfinished: Steps whose evaluations will be done (again): lines after the step's own line belong to them.
    """
    path = run_dir / FILE
    if not path.is_file():
        return
    kept, seen = 0, set()
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            found = orjson.loads(line)["step"]
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged: {error}. To go on: mv {path} {path}.damaged") from error
        if found > step or (found in seen and found in unfinished):
            break
        seen.add(found)
        kept += len(line)
    os.truncate(path, kept)
