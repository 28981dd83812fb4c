"""End the processes that user code started outside the guards, once this process has ended in any way.

Rewards and generate functions that run in this process may start processes that no guard knows. `watch` starts `main`
once, as a separate program that ends them. It recognizes them by an environment variable, which guards remove from the
processes they start, or by an open pipe: a fork without exec inherits the pipe from this process. Their output is
capped and stripped of secrets: descriptors 1 and 2 become a pipe to the program, and Python's streams of this process
keep their previous targets.

    this process --pipe--> program: waits for the end of this process, ends marked processes
         +--> processes of user code, marked; in any session, with any parent --output--> program --> stderr
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

from slime_core.workers.guard import relay

MARK = "SLIME_STARTED_BY"
OUTPUT = 16 << 20
"""Output limit in bytes: of all such processes and this process's native code together, and of a worker's tree."""
_TERM_S, _KILL_S = 2.0, 30.0
"""Seconds that processes get to end after SIGTERM, and to disappear after SIGKILL."""
_LAST_OUTPUT_S = 1.0
_BOOT = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from {__name__} import main; main()"
_owner = 0
_apart: dict[int, io.FileIO] = {}
"""Raw streams below Python's standard output and error; they keep the previous targets of descriptors 1 and 2."""


def watch() -> None:
    """End every process that this process starts from now on together with it, and cap the output; safe to call again.

    If Python's streams are captured (a notebook, pytest) or a stream is closed, the output is not redirected.
    """
    from slime_core.secrets import in_memory  # not at module level: the program cannot import it

    global _owner
    if _owner == os.getpid():
        return
    _owner = os.getpid()
    os.environ[MARK] = token = f"{_owner}-{secrets.token_hex(8)}"
    read, _ = os.pipe()  # the write end stays open as long as this process and its forks live
    output, write = os.pipe()
    raw = {number: _below(stream, number) for number, stream in ((1, sys.stdout), (2, sys.stderr))}
    apart = {number: stream for number, stream in raw.items() if stream is not None and None not in raw.values()}
    # A reader of standard error would wait for the program to close it: pass it on only if the program forwards to it.
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
    """Return the original descriptor 1 or 2, for a child without this cap; None: the child inherits the right one."""
    return _apart[number].fileno() if number in _apart else None


def _below(stream: object, number: int) -> io.FileIO | None:
    """Return the raw stream below one of Python's streams, or None if its descriptor is not `number`."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # an unbuffered stream is its own raw stream
    return raw if isinstance(raw, io.FileIO) and raw.fileno() == number else None


def _lead(stream: io.FileIO, descriptor: int) -> None:
    """Redirect a stream to another descriptor in place, since log handlers hold the objects above it."""
    stream.__init__(descriptor, "wb", closefd=False)  # type: ignore[misc]


def _print_as_others() -> None:
    """Print to descriptors 1 and 2 in a fork of this process."""
    for number, stream in _apart.items():
        _lead(stream, number)


def main() -> None:
    """Forward output and wait for the owner's end; then end marked processes until none is left.

    The command line has the token, the owner's process id, and the descriptors of the output and `secrets.in_memory`.
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
