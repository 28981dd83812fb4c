"""A program of its own that runs one server and leaves nothing of it behind, however server, slime or keeper end.

`python keeper.py --pipe FD --parent PID --grace SECONDS -- COMMAND...`, started with either
environment's interpreter: standard library only. What a reader would get wrong: it is two processes.
The first watches slime and runs the second, the second watches the first and runs the server; whichever is killed, the
other cleans up. Both are subreapers (prctl(2)): a descendant whose parent dies becomes their child, so one that has
changed its process group, its session or its parent is found all the same, and without children there are no
descendants.

    slime --pipe--> keeper --> keeper --> server (own session; killed with its keeper) --> its processes
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

STOP, KILL = b"s", b"k"
"""What slime writes into the pipe: end the server as it likes to end, or at once. A closed pipe means STOP."""
LEFTOVER_S = 1.0
"""For what a server that has ended leaves behind, between TERM and KILL."""
KILL_S = 30.0
"""For the kernel to end what was killed; a process in an uninterruptible call may take long."""
SHARED = "/dev/shm/sglang_loads_"
"""Start of a file that each of SGLang's schedulers makes (its managers/load_snapshot.py) and nobody removes."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PROCESSES = runpy.run_path(str(Path(__file__).parents[1] / "waits" / "processes.py"))
"""`slime_core.waits.processes`, which needs no package."""


def main(argv: list[str]) -> int:
    """Run the command; returns its exit status, or 128 and the signal that ended it."""
    options = dict(zip(argv[: argv.index("--") : 2], argv[1 : argv.index("--") : 2]))
    command = argv[argv.index("--") + 1 :]
    pipe, parent, grace = int(options["--pipe"]), int(options["--parent"]), float(options["--grace"])

    def run_server() -> None:
        keeper = os.getppid()
        os.setsid()
        if die_with(keeper):
            os.execvp(command[0], command)

    def run_second() -> None:
        os.close(pipe)
        # The first one asks this one to end and waits for it, so this one's time must be the shorter.
        os._exit(keep(first, None, grace, run_server))

    first = os.getpid()
    return keep(parent, pipe, grace + 2 * LEFTOVER_S, run_second)


def keep(parent: int, pipe: int | None, grace: float, run: Callable[[], None]) -> int:
    """Run a child until it ends, TERM arrives, or the parent or its end of the pipe is gone; then end every descendant.

    Args:
        parent: Process to watch, the caller's parent.
        pipe: Read end, for STOP and KILL; None: there is none.
        grace: Seconds between TERM and KILL.
        run: Called in the child.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake, write = os.pipe()
    os.set_blocking(write, False)
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda signum, _: asked.append(signum))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    child = os.fork()
    if child == 0:
        _run_child(run)
    sign, status = _watch(_Signs(parent, pipe, wake, asked), child)
    shared = _shared_files()
    if sign == KILL:
        status = _kill_all(None, child)
    elif sign == STOP:
        _send(child, signal.SIGTERM)
        status = _reap_for(grace, wake, child)
        if status is None:
            # Not yet the others: among them is what removes semaphores and shared memory once their users have gone.
            _send(child, signal.SIGKILL)
    if _has_children():
        for pid in descendants():
            _send(pid, signal.SIGTERM)
        status = _or(status, _reap_for(LEFTOVER_S, wake, None, child))
    status = _kill_all(status, child)
    for path in shared:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return status


class _Signs:
    """What tells that it is time to end."""

    def __init__(self, parent: int, pipe: int | None, wake: int, asked: list[int]) -> None:
        self._parent, self._pipe, self.wake, self._asked = parent, pipe, wake, asked
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)
        if pipe is not None:
            self._poll.register(pipe, select.POLLIN)
        self._every_ms: int | None = None
        try:
            self._pidfd = os.pidfd_open(parent)
            self._poll.register(self._pidfd, select.POLLIN)
        except OSError:  # an old kernel, a strict container, or the parent has gone already
            self._pidfd, self._every_ms = -1, 500

    def wait(self) -> bytes:
        """Until something happened: STOP, KILL, or nothing when it is only a child that ended."""
        gone = os.getppid() != self._parent
        ready = set() if gone else {fd for fd, _ in self._poll.poll(self._every_ms)}
        if self.wake in ready:
            os.read(self.wake, 4096)
        if self._pipe in ready and self._pipe is not None:
            return KILL if KILL in os.read(self._pipe, 4096) else STOP
        return STOP if gone or self._pidfd in ready or self._asked else b""


def _watch(signs: _Signs, child: int) -> tuple[bytes, int | None]:
    """STOP or KILL when the child has to be ended; else nothing, and the status with which it ended by itself."""
    while True:
        sign = signs.wait()
        status = _reap(child)
        if status is not None:
            return b"", status
        if sign:
            return sign, None


def _run_child(run: Callable[[], None]) -> None:
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        run()
    except OSError as error:
        print(f"cannot run: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _reap(child: int) -> int | None:
    """Collect whoever ended; the child's exit status once it has."""
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            code = os.waitstatus_to_exitcode(code)
            status = code if code >= 0 else 128 - code


def _reap_for(seconds: float, wake: int, until: int | None, child: int | None = None) -> int | None:
    """Wait for `until` to end, or with None for everybody."""
    end, status = time.monotonic() + seconds, None
    while _has_children():
        status = _or(status, _reap(until or child or 0))
        left = end - time.monotonic()
        if left <= 0 or (until is not None and status is not None):
            break
        if select.select([wake], [], [], min(left, 0.05))[0]:
            os.read(wake, 4096)
    return status


def _kill_all(status: int | None, child: int) -> int:
    end = time.monotonic() + KILL_S
    while _has_children():
        for pid in descendants():
            _send(pid, signal.SIGKILL)
        time.sleep(0.01)
        status = _or(status, _reap(child))
        if time.monotonic() > end:
            print(f"the kernel does not end {descendants()}", file=sys.stderr, flush=True)
            break
    return 128 + signal.SIGKILL if status is None else status


def _or(first: int | None, second: int | None) -> int | None:
    return second if first is None else first


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants() -> list[int]:
    """Processes below this one, parents first."""
    found: list[int] = _PROCESSES["below"](os.getpid())
    return found


def _shared_files() -> set[str]:
    """Those that descendants have mapped; asked while they run, since a killed one tells nothing."""
    found = set()
    for pid in descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            found |= {line.split(None, 5)[5].rstrip("\n") for line in maps if SHARED in line}
    return {path for path in found if not path.endswith(" (deleted)")}


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def die_with(parent: int) -> bool:
    """Have the kernel kill this process when its parent does end; False when it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
