"""The command is killed at random moments of its first seconds, and typed again until it comes to its end.

As a user types it, so that imports, the start of ranks and Ray's daemons are among the moments. After each kill nothing
of it is left, and the next command finds no lock; at the end nothing is lost or doubled. `SLIME_TEST_KILLS` says how
many kills a kind of run gets.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.backends.kill.runs import TINY, Kills
from tests.backends.whole_runs import command_line, still_running
from tests.conftest import MEASURED, SLIME, TinyRun

pytestmark = [pytest.mark.backends, pytest.mark.timeout(3000)]
KILLS = int(os.environ.get("SLIME_TEST_KILLS", "3"))
FIRST_S = 15.0
"""Within which a kill falls."""
GONE_S = 60.0
ENDS_S = 400.0
KILLED = -signal.SIGKILL
A_RUN = 5
"""Kills of one run directory, at most."""
MARK = "SLIME_TEST_RUN"
"""Variable that everything which a run starts inherits."""
RANKS: dict[str, Any] = {"train_backend": "embedded", "actor_num_gpus_per_node": 2, "device": "cpu"}
MEGATRON: dict[str, Any] = {"train_backend": "megatron", "tensor_model_parallel_size": 2, "device": "cpu"}
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "sync": ({}, True),
    "one-step": ({"async": True, "async_mode": "one-step"}, False),
    "full": ({"async": True, "async_mode": "full", "max_staleness": 2}, False),
    "two ranks": (RANKS, True),
    "megatron": (MEGATRON, False),
    "ray": ({"launcher": "ray"}, True),
}
"""Name -> flags, and whether the run must end with the bytes of the one that nobody kills."""


@pytest.mark.parametrize("name", MODES)
def test_killed_within_its_first_seconds(
    name: str, tiny: TinyRun, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    flags, bitwise = MODES[name]
    held = Kills(tiny, tmp_path, [], flags=flags, bitwise=bitwise)
    began = time.monotonic()
    assert run(command(tiny, held.whole, flags)) == 0
    span = min(FIRST_S, time.monotonic() - began)
    seed = time.time_ns() % 1_000_000
    rng, kills, runs = random.Random(seed), 0, 0
    while kills < KILLS:
        run_dir, runs = tmp_path / f"run{runs}", runs + 1
        argv = command(tiny, run_dir, flags)
        for _ in range(min(A_RUN, KILLS - kills)):
            status = run(argv, rng.uniform(0, span))
            kills += status == KILLED
            if status == 0:
                break
        else:
            assert run(argv) == 0
        held.promises(run_dir)
    record_property(MEASURED, f"{name}: {kills} kills of {runs} runs within {span:.1f} s, seed {seed}")


def command(tiny: TinyRun, run_dir: Path, flags: dict[str, Any]) -> list[str]:
    return [SLIME, "train", *tiny.argv(run_dir, **{**TINY, **flags, "load": run_dir})]


def run(argv: list[str], after: float | None = None) -> int:
    """Its status, killed after so many seconds if it has not ended; nothing of it is left."""
    token = secrets.token_hex(8)
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            argv, stdout=said, stderr=said, env={**os.environ, MARK: token, "OMP_NUM_THREADS": "1"}
        )
        try:
            status = process.wait(ENDS_S if after is None else after)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
            assert after is not None, "it does not come to its end"
        said.seek(0)
        assert status in (0, KILLED), f"status {status} (kill after {after}): {said.read()[-3000:].decode()}"
    left = still_running(marked(token), GONE_S)
    assert left == [], f"killed after {after} s: {[(p, command_line(p)) for p in left]}"
    return status


def marked(token: str) -> list[psutil.Process]:
    """Processes that the run has started, wherever they are."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == token:
                found.append(process)
    return found
