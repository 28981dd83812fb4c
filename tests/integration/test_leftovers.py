"""What a reward in the run's own process starts in the background ends with the run, and its output is bounded."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slime_core.workers.leftovers import OUTPUT
from tests.conftest import SLIME, Slime, TinyRun

REWARD = """
import asyncio, os, subprocess, time
from slime_core import RewardTraits, declares

def start():
    if os.path.getsize({pids!r}):
        return
    started = subprocess.Popen(["sleep", "1000000"], start_new_session=True)
    note(started.pid)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
    note(subprocess.Popen(["python3", "-c", deaf], stdout=subprocess.DEVNULL).pid)
    if os.fork() == 0:  # a daemon that executes nothing
        os.setsid()
        if os.fork() == 0:
            note(os.getpid())
            time.sleep(1000000)
        os._exit(0)

def note(pid):
    with open({pids!r}, "a") as file:
        file.write(f"{{pid}}\\n")

async def asynchronous(args, sample, **kwargs):
    start()
    await asyncio.sleep(1000)

@declares(RewardTraits(execution="inline"))
def inline(args, sample, **kwargs):
    start()
    return 1.0
"""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pids"
    (tmp_path / "mine.py").write_text(REWARD.format(pids=str(path)))
    path.touch()
    yield path
    for process in started(path):
        process.kill()


def started(pids: Path) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "killed"), [("asynchronous", True), ("inline", False)])
def test_what_a_reward_starts_ends_with_the_run(
    function: str, killed: bool, tiny: TinyRun, tmp_path: Path, pids: Path
) -> None:
    reward = f"{tmp_path / 'mine.py'}:{function}"
    changes = {"num_rollout": 1, "custom_rm_path": reward, "eval_interval": None, "eval_prompt_data": None}
    run = subprocess.Popen([SLIME, "train", *tiny.argv(tmp_path / "run", **changes)], stdout=subprocess.DEVNULL)
    if killed:
        until = time.monotonic() + 120
        while len(below := started(pids)) < 3:
            assert run.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        run.kill()
    assert run.wait(120) == (-signal.SIGKILL if killed else 0)
    assert psutil.wait_procs(below if killed else started(pids), timeout=60)[1] == []


LOUD = """
import os, subprocess, sys
from slime_core import RewardTraits, declares

MUCH = "import os\\nfor _ in range(40): os.write(1, bytes(1 << 20))"

@declares(RewardTraits(execution="inline"))
def inline(args, sample, **kwargs):
    if not os.path.exists({done!r}):
        subprocess.run([sys.executable, "-c", MUCH], check=True)
        if os.fork() == 0:
            print("printed by a fork", flush=True)
            os._exit(0)
        os.wait()
        print("printed by the reward", flush=True)
        open({done!r}, "x").close()
    return 1.0
"""


@pytest.mark.slow
def test_output_of_what_a_reward_starts_is_capped(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOUD.format(done=str(tmp_path / "done")))
    changes = {"num_rollout": 1, "custom_rm_path": f"{tmp_path / 'mine.py'}:inline", "eval_interval": None}
    run = slime("train", *tiny.argv(tmp_path / "run", **changes, eval_prompt_data=None))
    assert run.stderr.count("\0") == OUTPUT
    assert run.stderr.count("this output is left off") == 1
    assert "printed by a fork" not in run.stderr + run.stdout
    assert run.stdout.index("printed by the reward") < run.stdout.index("rollout 1/1")
