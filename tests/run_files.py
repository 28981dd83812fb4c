"""What a run leaves in its directory, as tests read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_core.learning.report import GAP


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def samples(run_dir: Path) -> list[dict[str, Any]]:
    """The samples of all stored rollouts."""
    return [sample for file in sorted((run_dir / "rollouts").iterdir()) for sample in json_lines(file)]


def metrics(run_dir: Path, apart_from: str | tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """By step, without the names that begin so."""
    lines = json_lines(run_dir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(apart_from)} for line in lines]


def timeless(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    return metrics(run_dir, "perf/")


def trained(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of the rollouts that were trained on."""
    return [line for line in metrics(run_dir) if "train/loss" in line]


def gaps(run_dir: Path) -> list[float]:
    """The largest difference of a log-prob of the trainer from the engine's, by rollout."""
    return [line[GAP] for line in metrics(run_dir) if GAP in line]


def last_commit(run_dir: Path, apart_from: tuple[str, ...] = ("ledger.json",)) -> dict[str, bytes]:
    """The files of the newest commit without what depends on the clock or the place, and without those named."""
    root = max((run_dir / "checkpoints").glob("rollout_*"))
    skipped = {root / name for name in ("state.json", "manifest.json", *apart_from)}
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p not in skipped}
