from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slime_core import secrets
from slime_core.errors import EngineError
from slime_core.workers.process import Guarded

SERVER = Path(__file__).with_name("stubborn_server.py")
PARENT = """
    import os, signal, sys, threading, time
    from pathlib import Path
    from slime_core.workers.process import Guarded

    for number in (signal.SIGINT, signal.SIGHUP):  # which these tests may have been started without, as by nohup
        signal.signal(number, signal.SIG_DFL)
    process = Guarded("server", log=Path(sys.argv[2]), stop_s=0.2, shared="/dev/shm/sglang_loads_")
    # In a thread that ends: whose death a server must not take for that of its parent.
    thread = threading.Thread(
        target=process.start, args=([sys.executable, sys.argv[1], sys.argv[3], *sys.argv[4:]], dict(os.environ))
    )
    thread.start()
    thread.join()
    if os.fork() == 0:  # a process of the trainer, which holds copies of everything that is open
        signal.alarm(60)
        signal.pause()
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    print(process.pid, flush=True)
    word = sys.stdin.readline().strip()
    if word == "raise":
        raise RuntimeError("boom")
    if word == "_exit":
        os._exit(5)
    if word == "return":
        sys.exit(0)
    time.sleep(60)
"""


def gone_within(pids: list[int], seconds: float = 30.0) -> bool:
    """Zombies count as gone: nobody may be there to collect them."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(running(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_file(server: int) -> Path:
    """As SGLang's schedulers leave one."""
    return Path(f"/dev/shm/sglang_loads_{server}.shm")


def guarded(tmp_path: Path, stop_s: float = 2.0) -> Guarded:
    return Guarded("server", log=tmp_path / "log", stop_s=stop_s, shared=str(shared_file(0))[:-5], error=EngineError)


def said(process: Guarded) -> list[str]:
    """What the last start wrote."""
    assert process.log is not None
    return process.log.read_bytes()[process.begin :].decode().splitlines()


Started = tuple[subprocess.Popen[str], int, list[int]]


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts a process that guards a stubborn server: the process, its guard, and all that must end."""
    started: list[subprocess.Popen[str]] = []
    pids: list[int] = []

    def start(*words: str) -> Started:
        argv = [sys.executable, "-c", textwrap.dedent(PARENT)]
        argv += [str(SERVER), str(tmp_path / "log"), str(tmp_path / "pids"), *words]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        guard = int(process.stdout.readline())
        second = [child.pid for child in psutil.Process(guard).children()]
        assert len(second) == 1
        pids.extend([guard, *second, *map(int, (tmp_path / "pids").read_text().split())])
        assert all(running(pid) for pid in pids), "the test must begin with everything running"
        return process, guard, list(pids)

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    for pid in pids:
        if running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_outlives_a_parent_ended_by_a_signal(parent: Callable[..., Started], number: int) -> None:
    process, _, pids = parent()
    process.send_signal(number)
    assert gone_within(pids)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["raise", "_exit", "return"])
def test_nothing_outlives_a_parent_that_ends(parent: Callable[..., Started], word: str) -> None:
    process, _, pids = parent()
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    assert gone_within(pids)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_outlives_a_killed_guard(parent: Callable[..., Started], which: int) -> None:
    _, _, pids = parent("deaf")
    os.kill(pids[which], signal.SIGKILL)
    assert gone_within(pids)


def test_a_signal_to_all_is_the_owners_and_the_commands_to_handle(parent: Callable[..., Started]) -> None:
    """Who drains for minutes needs its servers and ranks meanwhile."""
    process, _, pids = parent("deaf")
    for pid in pids[:2]:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert not gone_within(pids, 0.5)
    assert all(running(pid) for pid in pids)
    process.kill()
    assert gone_within(pids)


@pytest.mark.slow
def test_nothing_outlives_guard_and_parent_killed_together(parent: Callable[..., Started]) -> None:
    process, guard, pids = parent("deaf")
    process.kill()
    os.kill(guard, signal.SIGKILL)
    assert gone_within(pids)


def test_a_server_that_ends_leaves_no_descendants(tmp_path: Path) -> None:
    process = guarded(tmp_path)
    process.start([sys.executable, str(SERVER), str(tmp_path / "pids"), "exit"], dict(os.environ))
    end = time.monotonic() + 60
    while process.alive and time.monotonic() < end:
        time.sleep(0.01)
    assert process.ending() == "exited with status 3"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert not any(running(pid) for pid in pids)
    assert not shared_file(pids[0]).exists()


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[tuple[Guarded, list[int]]]:
    process = guarded(tmp_path, 0.2)
    process.start([sys.executable, str(SERVER), str(tmp_path / "pids"), "deaf"], dict(os.environ))
    end = time.monotonic() + 60
    while not (tmp_path / "pids").exists() and time.monotonic() < end:
        time.sleep(0.01)
    yield process, [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    process.kill()


def test_kill_ends_a_frozen_server_at_once(stubborn: tuple[Guarded, list[int]]) -> None:
    process, pids = stubborn
    os.kill(pids[0], signal.SIGSTOP)
    started = time.monotonic()
    process.kill()
    assert time.monotonic() - started < 10
    assert not any(running(pid) for pid in pids)
    assert not shared_file(pids[0]).exists()
    assert process.ending() == "was killed by signal 9 (SIGKILL)"


def test_it_runs_only_once_at_a_time_and_again_afterwards(stubborn: tuple[Guarded, list[int]]) -> None:
    process, _ = stubborn
    with pytest.raises(EngineError, match="server runs already"):
        process.start(["true"], {})
    process.kill()
    process.start([sys.executable, "-c", "print('second')"], dict(os.environ))
    end = time.monotonic() + 60
    while process.alive and time.monotonic() < end:
        time.sleep(0.01)
    assert said(process) == ["second"]
    text = process.log.read_text()
    assert "server, start 1: " in text
    assert "server, start 2: " in text


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    process = guarded(tmp_path)
    process.start(["/no/such/program"], {})
    end = time.monotonic() + 60
    while process.alive and time.monotonic() < end:
        time.sleep(0.02)
    process.stop()
    assert "cannot run: " in said(process)[0]
    assert "No such file" in said(process)[0]


def test_it_tells_the_commands_process_and_hands_on_what_is_its_alone() -> None:
    ours, theirs = os.pipe()
    process = Guarded("command")
    program = f"import os; os.write({theirs}, b'%d' % os.getpid())"
    process.start([sys.executable, "-c", program], only=[theirs])
    os.close(theirs)
    with open(ours, "rb") as told:  # to the end, which comes though the guard may live
        assert int(told.read()) == process.child
    assert process.wait(60) == 0


def test_output_is_cut_at_the_cap_and_its_end_kept_before(tmp_path: Path) -> None:
    program = "import os, sys; sys.stdout.write('x' * 150 + 'last words'); sys.stdout.flush(); os.abort()"
    for cap, expected in [(1000, "x" * 150 + "last words"), (100, "x" * 100)]:
        process = Guarded("noisy", log=tmp_path / str(cap), cap=cap)
        process.start([sys.executable, "-c", program])
        assert process.wait(60) == 128 + signal.SIGABRT
        assert said(process)[0] == expected
        assert ("left off" in said(process)[-1]) == (cap == 100)


def test_secrets_are_masked_in_output_and_in_the_command_of_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, one the beginning of another, by a daemon; what looks like the beginning of one is not lost."""
    monkeypatch.setattr(secrets, "_known", set())
    for key in ("abcdabcd", "abcdabcdXYZ", "aXYa"):
        secrets.learn("api_key", key)
    program = (
        "import os, sys, time\n"
        "for piece in sys.argv[1].split('|'): os.write(1, piece.encode()); time.sleep(0.02)\n"
        "os.fork() or (os.setsid(), os.write(2, sys.argv[2].encode() + b'\\n'), os._exit(0))\n"
        "os.wait()\n"
        "held = [f'/proc/self/fd/{n}' for n in range(3, 20)]\n"
        "print(any('memfd' in os.readlink(path) for path in held if os.path.lexists(path)), flush=True)\n"
        "os.write(1, b'abc')"
    )
    process = Guarded("loud", log=tmp_path / "log", cap=1 << 20)
    process.start([sys.executable, "-c", program, "1 abcd|abcd|\n2 abcdabcd|XYZ\n3 abcdabcdXY\n4 aXYa|\n", "abcdabcd"])
    assert process.wait(60) == 0
    log = (tmp_path / "log").read_text()
    assert "abcdabcd" not in log
    mark = secrets.MARK
    assert said(process) == [f"1 {mark}", f"2 {mark}", f"3 {mark}XY", f"4 {mark}", mark, "False", "abc"]


def test_endless_output_does_not_hold_up_the_end(tmp_path: Path) -> None:
    process = Guarded("noisy", log=tmp_path / "log", cap=1000)
    process.start(["yes"])
    end = time.monotonic() + 60
    while len(said(process)) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    assert process.log is not None
    assert process.log.stat().st_size < 2000
