"""Writes `metrics.jsonl` in the run directory: one line per rollout, always on.

On resume the lines after the checkpoint are cut off, so the file reads as if the run had never been interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from slime_core.plugins.hookspecs import hookimpl

FILE = "metrics.jsonl"


class JsonlTracker:
    """Appends metrics as JSON lines."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    @hookimpl
    def slime_run_start(self, args: Any, run_dir: Path) -> None:
        """Open the file, keeping the lines up to the checkpoint that the run resumes from."""
        path = run_dir / FILE
        kept = [line for line in _lines(path) if line["step"] <= args.start_rollout_id] if args.start_rollout_id else []
        partial = path.with_name(f".{FILE}.partial")
        partial.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in kept))
        os.replace(partial, path)
        self._file = path.open("ab")

    @hookimpl
    def slime_log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line; `step` counts finished rollouts."""
        if self._file is not None:
            self._file.write(orjson.dumps({"step": step, **metrics}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
            self._file.flush()

    @hookimpl
    def slime_run_end(self, error: BaseException | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of the file; a last line cut by a kill is left out."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    return [orjson.loads(line) for line in lines[:-1] if line]
