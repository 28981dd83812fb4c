"""JSON files of a trainer's checkpoint, the same in both trainers: counters, schedule, random states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_core.errors import CheckpointError


def write_json(path: Path, value: Any) -> None:
    """Write `value`, indented."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The object of a file. Raises CheckpointError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
