"""SIGTERM ends a command cleanly: hooks are told, and nothing that a reward started is left.

What a run keeps of its work is in `tests/integration/test_drain.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slime_runs.processes import runs

from slime_core.cli import main as frame
from slime_core.launch.drain import Drain, Termination
from slime_core.protocols import Command
from slime_core.waits import asked_to_end
from tests.conftest import SLIME, TinyRun, without_start
from tests.until import wait_until

HOOK = """
[project]
name = "slime-hook-ends"
version = "0.1.0"
dependencies = ["slime-rl"]

[project.entry-points."slime.plugins"]
ends = "ends"
"""
MODULE = """
from pathlib import Path

from slime_core import hookimpl


@hookimpl
def slime_run_end(error):
    Path(__file__).with_name("ended").write_text(type(error).__name__)
"""
REWARD = """
import subprocess
import time
from pathlib import Path


def reward(args, sample):
    child = subprocess.Popen(["sleep", "600"])
    with Path(__file__).with_name("started").open("a") as file:
        file.write(f"{child.pid}\\n")
    time.sleep(600)
"""


def _is_line(file: Path) -> bool:
    return file.exists() and file.read_text().endswith("\n")


@pytest.mark.slow
@pytest.mark.parametrize("ignores_ctrl_c", [False, True], ids=["foreground", "background"])
def test_sigterm_ends_a_run_cleanly(ignores_ctrl_c: bool, tiny: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(HOOK)
    (tmp_path / "ends.py").write_text(MODULE)
    (tmp_path / "rm.py").write_text(REWARD)
    started = tmp_path / "started"
    argv = tiny.argv(
        tmp_path / "run",
        custom_rm_path=tmp_path / "rm.py",
        plugin_dir=tmp_path,
        eval_interval=None,
        eval_prompt_data=None,
    )
    # What a shell does to a command started with `&` in a script.
    shell = ["bash", "-c", 'trap "" INT; exec "$@"', "-"] if ignores_ctrl_c else []
    process = subprocess.Popen(
        [*shell, SLIME, "train", *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: _is_line(started) or process.poll() is not None, "the reward is not called")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # `timeout` signals the process and then its group
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, said
    said = without_start(said)
    assert said.startswith("slime: SIGTERM: ending with a commit of what is trained, within 300 s")
    assert said.count("\n") == 1, said
    assert (tmp_path / "ended").read_text() == "NoneType"
    children = [int(pid) for pid in started.read_text().split()]
    assert children
    wait_until(lambda: not any(map(runs, children)), "what the reward started is still there")


def test_the_signal_is_a_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(argv: list[str]) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 10)
        raise AssertionError("SIGTERM was ignored")

    monkeypatch.setattr("slime_core.plugins.commands.load", lambda argv: Command(stop))
    before = signal.getsignal(signal.SIGTERM)
    assert frame.main(["config"]) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err == "slime: ended by SIGTERM\n"


def test_a_handler_of_the_embedding_program_stays() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Termination() as termination:
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert not termination.asked
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_child_dies_of_it() -> None:
    code = (
        "import os, signal\n"
        "from slime_core.launch.drain import Termination\n"
        "with Termination():\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.sigtimedwait([], 10)\n"
        "        os._exit(1)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("-15\n", 0), done.stderr


def test_handlers_that_user_code_replaced_are_restored(caplog: pytest.LogCaptureFixture) -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    with Termination() as termination:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an import of user code before the loop
        with Drain(60.0, quiet=True) as draining:
            assert signal.getsignal(signal.SIGTERM) == termination._on_signal
            assert not draining.stops()
            assert not caplog.text
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            assert not draining.stops()
            assert caplog.text.count("user code replaced the handler of SIGTERM, which ends a run; restored") == 1
            signal.raise_signal(signal.SIGINT)
            assert draining.stops()
            assert termination.interrupted
    asked_to_end(None)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (signal.SIG_DFL, interrupt)
