"""A command that is killed leaves nothing below it; one that ends leaves its daemons to themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

_COMMAND = """
import importlib.util, subprocess, sys
spec = importlib.util.spec_from_file_location("keeper", sys.argv[1])
keeper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(keeper)
daemon = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
kept = keeper.Keeper()
print(daemon.pid, kept._process.pid, flush=True)
sys.stdin.readline()
kept.close()
"""


@pytest.fixture
def command() -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A command with one daemon and its keeper."""
    from slime_core.procs.leftovers import __file__ as path

    argv = [sys.executable, "-I", "-S", "-c", _COMMAND, path]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        below = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        yield process, below
        for left in [p for p in below if p.is_running()]:
            left.kill()


@pytest.mark.slow
def test_a_kill(command: tuple[subprocess.Popen[str], list[psutil.Process]]) -> None:
    process, below = command
    process.kill()
    assert psutil.wait_procs(below, timeout=60)[1] == []


def test_an_end(command: tuple[subprocess.Popen[str], list[psutil.Process]]) -> None:
    process, (daemon, keeper) = command
    process.communicate("\n", timeout=60)
    assert psutil.wait_procs([keeper], timeout=60)[1] == []
    assert daemon.is_running()
