"""What a run leaves in its directory, as tests read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def metrics(run_dir: Path, apart_from: str | tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """By step, without the names that begin so."""
    lines = json_lines(run_dir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(apart_from)} for line in lines]


def timeless(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    return metrics(run_dir, "perf/")
