"""The guard: a program that runs one command and leaves no process of it behind, however command, owner or guard end.

`process.Guarded` starts it as `python guard.py OPTIONS -- COMMAND`; it uses the standard library only. The guard is two
processes. The first watches the owner and runs the second. The second watches the first and runs the command. If either
is killed, the other cleans up. Both are subreapers (prctl(2)): a descendant whose parent dies becomes their child. So
the guard also finds a descendant that changed its process group, session or parent, and a guard without children has no
descendants.

    owner --control--> guard --> guard --> command (own session; killed with its guard) --> its processes
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

STOP, KILL = b"s", b"k"
"""Messages of the owner: end the command with SIGTERM first, or kill it at once."""
_ORPHAN = b"o"
"""Sign that the owner has ended, or has closed its end of the control socket."""
_SIGNALS = {STOP: signal.SIGUSR1, _ORPHAN: signal.SIGUSR2}
"""Signals from the first guard to the second. Other signals are for the owner and the command: a scheduler may send
them to all processes at once, but the owner decides how long the command may take to end."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_KILL_S = 30.0
"""Seconds for the kernel to end killed processes; a process in an uninterruptible call may take long."""
_OUTPUT_S = 1.0
"""Seconds to forward the last output of a command, since its reader may not read."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Times(NamedTuple):
    """Seconds between TERM and KILL."""

    stop: float
    """Seconds for the command when the owner asks it to end."""
    orphan: float
    """Seconds for the command when the owner has gone."""
    leftover: float
    """Seconds for the processes that an ended command leaves behind."""


def main(argv: list[str], execute: Callable[[list[str]], object] | None = None) -> int:
    """Run the command. Returns its exit status, or 128 plus the signal that ended it.

    Options, each with a value:
        --control: The socket to the owner; the guard writes the command's process id to it.
        --parent: The owner's process id.
        --times: `Times`, comma-separated.
        --only: Descriptors, comma-separated, that only the command keeps open.
        --cap: Maximum bytes of output; the rest is dropped.
        --hidden: Descriptor of the secrets to mask in the output; see `relay`.
        --pid-as: Environment variable of the command that holds its process id.
        --shared: Prefix of the files that the command's processes map; these files are removed when they end.

    Args:
        argv: Options, `--`, and the command.
        execute: Function to call with the command instead of executing it.
    """
    cut = argv.index("--")
    options, command = dict(zip(argv[:cut:2], argv[1:cut:2])), argv[cut + 1 :]
    control, times = int(options["--control"]), Times(*map(float, options["--times"].split(",")))
    only = [int(number) for number in options.get("--only", "").split(",") if number]
    first, cap, shared = os.getpid(), int(options.get("--cap", 0)), options.get("--shared", "")
    os.set_inheritable(hidden := int(options.get("--hidden", control)), False)  # the second guard's, not the command's

    def run_command() -> None:
        os.setsid()
        if name := options.get("--pid-as"):
            os.environ[name] = str(os.getpid())
        execute(command) if execute else os.execvp(command[0], command)

    def run_second() -> None:
        output = _Output(cap, hidden) if cap else None
        second = os.getpid()

        def run_third() -> None:
            os.close(control)
            if output is not None:
                output.take()
            if die_with(second):
                run_command()

        def begun(child: int) -> None:
            with contextlib.suppress(OSError):  # the owner has gone; the first guard sees this itself
                os.write(control, b"%d\n" % child)
            _let_go([0, control, *only])
            if output is not None:
                output.forward()

        status = _keep(_Signs(first), times, run_third, begun, shared, dict.fromkeys(_SIGNALS, signal.SIGTERM))
        if output is not None:
            output.end()
        os._exit(status)

    # The first guard asks the second to end and waits for it, so the second guard's times must be shorter.
    longer = Times(times.stop + 2 * times.leftover, times.orphan + 2 * times.leftover, times.leftover)
    signs = _Signs(int(options["--parent"]), control)
    return _keep(signs, longer, run_second, lambda _: _let_go([0, *only]), shared, _SIGNALS)


def _keep(
    signs: _Signs, times: Times, run: Callable[[], None], begun: Callable[[int], None], shared: str,
    ends: dict[bytes, signal.Signals],
) -> int:  # fmt: skip
    """Run a child until it ends or a sign asks for its end; then end every descendant. Returns its exit status.

    Args:
        signs: Signs that ask for the end.
        times: Seconds between TERM and KILL.
        run: Function to call in the child.
        begun: Function to call with the child's process id.
        shared: See `main`.
        ends: Mapping from a sign to the signal that asks the child to end.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _run_child(run)
    begun(child)
    sign, status = _watch(signs, child)
    mapped = _mapped(shared) if shared else set()
    if sign in ends:
        _send(child, ends[sign])
        status = _reap_for(times.stop if sign == STOP else times.orphan, signs.wake, child)
    if sign and status is None:
        # Kill only the child now: its descendants include a process that removes semaphores and shared memory later.
        _send(child, signal.SIGKILL)
    if _has_children():
        for pid in descendants():
            _send(pid, signal.SIGTERM)
        status = _or(status, _reap_for(times.leftover, signs.wake, None, child))
    status = _kill_all(status, child)
    for path in mapped:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return status


class _Signs:
    """The signs that ask for the end: the control socket, the owner's death, a signal of the first guard."""

    def __init__(self, parent: int, control: int | None = None) -> None:
        self.wake, write = os.pipe()
        os.set_blocking(write, False)
        self._parent, self._control, self._asked = parent, control, list[int]()
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        for number in _SIGNALS.values():
            signal.signal(number, lambda signum, _: self._asked.append(signum))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self.wake, select.POLLIN)
        if control is not None:
            self._poll.register(control, select.POLLIN)
        self._every_ms: int | None = None
        try:
            self._pidfd = os.pidfd_open(parent)
            self._poll.register(self._pidfd, select.POLLIN)
        except OSError:  # an old kernel, a strict container, or the parent has gone already
            self._pidfd, self._every_ms = -1, 500

    def wait(self) -> bytes:
        """Wait for an event. Returns STOP, KILL or _ORPHAN, or an empty sign, for example when a child has ended."""
        gone = os.getppid() != self._parent
        ready = set() if gone else {fd for fd, _ in self._poll.poll(self._every_ms)}
        if self.wake in ready:
            os.read(self.wake, 4096)
        if self._control in ready and self._control is not None:
            try:
                said = os.read(self._control, 4096)
            except ConnectionResetError:  # the parent ended with unread data: closed
                said = b""
            return KILL if KILL in said else STOP if STOP in said else _ORPHAN
        if self._asked:
            return _ORPHAN if _SIGNALS[_ORPHAN] in self._asked else STOP
        return _ORPHAN if gone or self._pidfd in ready else b""


class _Output:
    """A pipe for the command's output, which the guard forwards up to a limit."""

    def __init__(self, cap: int, hidden: int) -> None:
        self._cap, self._hidden = cap, hidden
        self._read, self._write = os.pipe()

    def take(self) -> None:
        """Redirect output to the pipe; called in the command's process."""
        for number in (1, 2):
            os.dup2(self._write, number)

    def forward(self) -> None:
        """Start to forward the output, in a thread because its reader may be slow; called in the guard."""
        import threading

        os.close(self._write)
        self._thread = threading.Thread(target=relay, args=(self._read, self._cap, self._hidden), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait up to `_OUTPUT_S` seconds for the rest of the output; called when the command's processes have ended."""
        self._thread.join(_OUTPUT_S)


def relay(source: int, cap: int, hidden: int) -> None:
    """Copy output from a pipe to standard error until all its writers have ended.

    Args:
        source: Descriptor to read from.
        cap: Maximum bytes to write; the rest is dropped.
        hidden: Descriptor of `secrets.in_memory`. Each secret is replaced by a mark. Output that may be the beginning
            of a secret is held until more output arrives.
    """
    with open(hidden, "rb") as file:
        secrets = sorted(file.read().split(b"\0")[:-1], key=len, reverse=True)
    one = re.compile(b"|".join(map(re.escape, secrets)) or b"(?!)")
    data, more = b"", b" "
    while more:
        more = os.read(source, 1 << 16)
        data += more
        tails = (len(data) - n for secret in secrets for n in range(1, len(secret)) if data.endswith(secret[:n]))
        end = min(tails, default=len(data)) if more else len(data)
        end = next((found.start() for found in one.finditer(data) if found.start() < end < found.end()), end)
        masked, data = one.sub(b"<not kept>", data[:end]), data[end:]
        with contextlib.suppress(OSError):  # standard error is closed
            os.write(2, masked[: max(cap, 0)])
            if 0 <= cap < len(masked):
                os.write(2, b"\n[slime: the rest of this output is left off]\n")
        cap -= len(masked)


def _watch(signs: _Signs, child: int) -> tuple[bytes, int | None]:
    """Wait for a sign or for the child's end. Returns (sign, None), or an empty sign and the child's exit status."""
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
        for number in (*_IGNORED, *_SIGNALS.values(), signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        run()
    except OSError as error:
        print(f"cannot run: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _let_go(descriptors: list[int]) -> None:
    """Close descriptors that only the command keeps, so that peers see them close. Replace 0 by /dev/null."""
    for number in descriptors:
        with contextlib.suppress(OSError):
            os.close(number)
    if 0 in descriptors:
        os.open(os.devnull, os.O_RDONLY)


def _reap(child: int) -> int | None:
    """Reap all ended children. Returns the exit status of `child`, or None if it has not ended."""
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
    """Reap children until process `until` has ended, or all of them without `until`, for at most `seconds`.

    Returns the exit status of `until` (without it, of `child`), or None if that process did not end here.
    """
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
    end = time.monotonic() + _KILL_S
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


def descendants(root: int | None = None) -> list[int]:
    """Return the running descendants of a process (by default this one), parents first; empty without /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found, queue = list[int](), [root or os.getpid()]
    while queue:
        found += (more := children.get(queue.pop(0), []))
        queue += more
    return found


def _mapped(shared: str) -> set[str]:
    """Return the files mapped by descendants; called while they run, since a killed process has no maps."""
    found = set()
    for pid in descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            found |= {line.split(None, 5)[5].rstrip("\n") for line in maps if shared in line}
    return {path for path in found if not path.endswith(" (deleted)")}


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def die_with(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends. Returns False if the parent has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
