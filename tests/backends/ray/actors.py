"""Runs on a Ray cluster as the tests here look at them: begun, their actors' processes, and what they leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.backends.whole_runs import Run, hold, release, running
from tests.conftest import SLIME, TinyRun
from tests.run_files import timeless

_OF_THE_PLACE = ("state.json", "manifest.json", "ledger.json")
HELD = 3
"""Rollout, counted from 0, that does not reach the trainer of a held run before it is released."""
_DEADLINE_S = 120.0
"""For what a test waits for, on a machine with much else to do."""


@contextmanager
def begun(tiny: TinyRun, cluster: str, tmp_path: Path, *, held: bool = False, **changes: Any) -> Iterator[Run]:
    """A run below `tmp_path` that has done two rollouts; `held`: it does not come to its end until `struck`."""
    if held:
        changes["custom_rollout_log_function_path"] = hold(tmp_path, HELD)
    argv = [SLIME, "train", *tiny.argv(tmp_path / "run", **changes), "--ray-address", cluster]
    with running(argv, tmp_path, tmp_path / "log") as run:
        run.until("rollout 2/")
        yield run


def actors(run_dir: Path) -> dict[str, int]:
    """Name of each actor that lives -> its process, by its log, which Python's streams write to at any descriptor."""
    found = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            log = Path(os.readlink(link))
        except OSError:
            continue
        if log.parent == run_dir / "actors" and _is_actor(link.parents[1]):
            found[log.stem] = int(link.parents[1].name)
    return found


def struck(run: Run, tmp_path: Path, name: str, anew: set[str]) -> tuple[dict[str, int], dict[str, int]]:
    """SIGKILL to one actor of a held run, which then goes on; all of them before, and once those `anew` are others."""
    before = actors(tmp_path / "run")
    os.kill(before[name], signal.SIGKILL)
    release(tmp_path)
    until = time.monotonic() + _DEADLINE_S
    while True:
        after = actors(tmp_path / "run")
        if all(after.get(one, before[one]) != before[one] for one in anew):
            return before, after
        assert not run.ended, run.said()
        assert time.monotonic() < until, run.said()
        time.sleep(0.02)


def ended(run_dir: Path) -> None:
    """No actor is left, soon after the end of a run whose cluster goes on."""
    until = time.monotonic() + _DEADLINE_S
    while actors(run_dir):
        assert time.monotonic() < until, "its actors end with it"
        time.sleep(0.1)


def _is_actor(process: Path) -> bool:
    try:
        return (process / "cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def files(run_dir: Path) -> dict[str, bytes]:
    """The last checkpoint, without what names the run's settings or its ledger's files."""
    root = max((run_dir / "checkpoints").glob("rollout_*"))
    return {
        str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name not in _OF_THE_PLACE
    }


def verified(run_dir: Path, slime: Any, rollouts: int) -> None:
    """Nothing was skipped or done twice: by the ledger, and by the metrics."""
    assert slime("ledger", "verify", run_dir).returncode == 0
    steps = [line["step"] for line in timeless(run_dir) if "train/loss" in line]
    assert steps == list(range(1, rollouts + 1))
