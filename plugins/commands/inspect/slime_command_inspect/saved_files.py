"""Which files of samples a user means: a run's, those of a directory, one, or those of a glob pattern."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path

from slime_core.errors import DataError


def saved_files(sources: Iterable[str]) -> Iterator[Path]:
    """In order; of a run, what `slime rollout` saved, or else what it kept of training. Raises DataError for none."""
    for source in sources:
        path = Path(source)
        if path.is_dir():
            files = _of_directory(path)
        else:
            files = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(source, recursive=True))]
        if not files:
            raise DataError(f"{source}: no samples there; runs keep them in RUN/samples, slime rollout in RUN/rollouts")
        yield from files


def _of_directory(path: Path) -> list[Path]:
    for folder in (path / "rollouts", path / "samples", path):
        if found := sorted([*folder.glob("rollout_[0-9]*.jsonl"), *folder.glob("rollout_[0-9]*.jsonl.zst")]):
            return found
    return []
