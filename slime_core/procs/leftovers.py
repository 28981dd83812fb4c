"""What user code starts beside the guards, ended when this process has ended, however it did.

`watch` starts this file as a program of its own, once: rewards and generate functions that run in this process may
start others, which no guard knows. They are told by an environment variable, which guards take away from what they
start, or by a pipe that they hold open: what was forked and executed nothing has it from this process.

    this process --pipe--> program: waits for the end of this process, ends what is marked
         +--> what user code starts, marked; in whatever session and below whomever
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import sys
import time

MARK = "SLIME_STARTED_BY"
_TERM_S, _KILL_S = 2.0, 30.0
"""For them to end as they like to, and for the kernel to end what was killed."""
_owner = 0


def watch() -> None:
    """Have what this process starts from here on end with it; safe to call again."""
    global _owner
    if _owner == os.getpid():
        return
    _owner = os.getpid()
    os.environ[MARK] = token = f"{_owner}-{secrets.token_hex(8)}"
    read, _ = os.pipe()  # whose other end stays open as long as this process, and forks of it, live
    argv = [sys.executable, "-I", "-S", __file__, str(_owner), token]
    nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    os.posix_spawn(argv[0], argv, {}, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0), *nothing], setsid=True)
    os.close(read)


def main(owner: int, token: str) -> None:
    """Wait for the owner's end; then end what is marked until nothing is left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
