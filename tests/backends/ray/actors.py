"""Runs on a Ray cluster as the tests here look at them: begun, their actors' processes, and what they leave."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.backends.whole_runs import Run, running
from tests.conftest import SLIME, TinyRun

_OF_THE_PLACE = ("state.json", "manifest.json", "ledger.json")


@contextmanager
def begun(tiny: TinyRun, cluster: str, tmp_path: Path, **changes: Any) -> Iterator[Run]:
    """A run below `tmp_path` that has done two rollouts."""
    argv = [SLIME, "train", *tiny.argv(tmp_path / "run", **changes), "--ray-address", cluster]
    with running(argv, tmp_path, tmp_path / "log") as run:
        run.until("rollout 2/")
        yield run


def actors(run_dir: Path) -> dict[str, int]:
    """Name of each actor that lives -> its process, by its log."""
    found = {}
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            log = Path(os.readlink(link))
        except OSError:
            continue
        if log.parent == run_dir / "actors" and _is_actor(link.parents[1]):
            found[log.stem] = int(link.parents[1].name)
    return found


def _is_actor(process: Path) -> bool:
    try:
        return (process / "cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def files(run_dir: Path) -> dict[str, bytes]:
    """The last checkpoint, without what names the run's settings or its ledger's files."""
    root = max((run_dir / "checkpoints").glob("rollout_*"))
    return {
        str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name not in _OF_THE_PLACE
    }


def verified(run_dir: Path, slime: Any, rollouts: int) -> None:
    """Nothing was skipped or done twice: by the ledger, and by the metrics."""
    assert slime("ledger", "verify", run_dir).returncode == 0
    steps = [line["step"] for line in metrics(run_dir) if "train/loss" in line]
    assert steps == list(range(1, rollouts + 1))
