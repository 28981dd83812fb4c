"""What user code starts beside the guards, ended when this process has ended, however it did.

`watch` starts `main` as a program of its own, once: rewards and generate functions that run in this process may
start others, which no guard knows. They are told by an environment variable, which guards take away from what they
start, or by a pipe that they hold open: what was forked and executed nothing has it from this process. Their output is
capped and without secrets: descriptors 1 and 2 become a pipe to that program, and Python's streams of this process keep
where they led.

    this process --pipe--> program: waits for the end of this process, ends what is marked
         +--> what user code starts, marked; in whatever session and below whomever --output--> program --> stderr
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from slime_core.procs.guard import relay

MARK = "SLIME_STARTED_BY"
OUTPUT = 16 << 20
"""Bytes that they may print together, with native code of this process; and one worker, with what it starts."""
_TERM_S, _KILL_S = 2.0, 30.0
"""For them to end as they like to, and for the kernel to end what was killed."""
_LAST_OUTPUT_S = 1.0
_BOOT = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from {__name__} import main; main()"
_owner = 0
_apart: dict[int, io.FileIO] = {}
"""Below Python's standard output and error, which keep where descriptors 1 and 2 led."""


def watch() -> None:
    """Have what this process starts from here on end with it, its output capped; safe to call again.

    Where somebody captures Python's streams (a notebook, pytest) or one is closed, all output stays where it goes.
    """
    from slime_core.secrets import in_memory  # not where this module is the program

    global _owner
    if _owner == os.getpid():
        return
    _owner = os.getpid()
    os.environ[MARK] = token = f"{_owner}-{secrets.token_hex(8)}"
    read, _ = os.pipe()  # whose other end stays open as long as this process, and forks of it, live
    output, write = os.pipe()
    raw = {number: _below(stream, number) for number, stream in ((1, sys.stdout), (2, sys.stderr))}
    apart = {number: stream for number, stream in raw.items() if stream is not None and None not in raw.values()}
    # What the program has open nobody sees close: its standard error only where it forwards to it.
    silent = [] if apart else [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    hidden = in_memory()
    pipes = [(os.POSIX_SPAWN_DUP2, a, b) for a, b in ((output, output), (hidden, hidden), (read, 0), (2, 1))]
    argv = [sys.executable, "-I", "-S", "-c", _BOOT, token, *map(str, (_owner, output, hidden))]
    os.posix_spawn(argv[0], argv, {}, file_actions=[*silent, *pipes], setsid=True)
    for number, stream in apart.items():
        _lead(stream, os.dup(number))
        os.dup2(write, number)
    for descriptor in (read, output, write, hidden):
        os.close(descriptor)
    _apart.update(apart)
    os.register_at_fork(after_in_child=_print_as_others)


def own(number: int) -> int | None:
    """Where this process prints (1, 2), for a child that is capped elsewhere or by nothing; None: as it inherits."""
    return _apart[number].fileno() if number in _apart else None


def _below(stream: Any, number: int) -> io.FileIO | None:
    """What is below one of Python's streams; None where it does not lead to the descriptor of this number."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # itself where Python does not buffer
    return raw if isinstance(raw, io.FileIO) and raw.fileno() == number else None


def _lead(stream: io.FileIO, descriptor: int) -> None:
    """Have it write to another descriptor: handlers of logs hold the objects above it."""
    stream.__init__(descriptor, "wb", closefd=False)  # type: ignore[misc]


def _print_as_others() -> None:
    """In a fork of this process."""
    for number, stream in _apart.items():
        _lead(stream, number)


def main() -> None:
    """Forward output, and wait for the owner's end; then end what is marked until nothing is left.

    Of the command line: the token, the owner's process id, the descriptors of output and of `secrets.in_memory`.
    """
    token, (owner, output, hidden) = sys.argv[1], map(int, sys.argv[2:])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    forwarding = threading.Thread(target=relay, args=(output, OUTPUT, hidden), daemon=True)
    forwarding.start()
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(owner)], [], [])
    begin, told = time.monotonic(), set[int]()
    while found := _marked(f"{MARK}={token}".encode(), os.readlink("/proc/self/fd/0")):
        passed = time.monotonic() - begin
        for pid in found if passed > _TERM_S else set(found) - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if passed > _TERM_S else signal.SIGTERM)
        told |= set(found)
        if passed > _KILL_S:
            break
        time.sleep(0.05)
    forwarding.join(_LAST_OUTPUT_S)


def _marked(mark: bytes, pipe: str) -> list[int]:
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = mark in file.read().split(b"\0")
            if marked or (pid != os.getpid() and _holds(pid, pipe)):
                found.append(pid)
    return found


def _holds(pid: int, pipe: str) -> bool:
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{number}") == pipe:
                return True
    return False
