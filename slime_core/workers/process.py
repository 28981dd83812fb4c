"""Run a command as a process under a guard (`guard.py`), so that no descendant of it is left behind.

Every child of this package and of its plugins is a `Guarded`; `leftovers.py` handles processes that user code starts.
`alive` and `poll` report the state of the guard, which lives until the last descendant has ended. Once the guard has
ended, ports and memory are free.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from slime_core.errors import SlimeError
from slime_core.secrets import hidden, in_memory
from slime_core.workers import guard, leftovers

_START_S = 60.0
"""Seconds for a guard to start, on a busy machine."""
_MARGIN_S = 10.0


def readable(descriptors: Iterable[int], seconds: float | None = None) -> list[int]:
    """Wait until some of the descriptors can be read, or for so many seconds, and return these.

    Other than `select.select` it takes descriptors beyond 1,023.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [ready for ready, _ in poll.poll(None if seconds is None else seconds * 1000)]


def python() -> list[str]:
    """Return the command of this interpreter; the working directory is on `sys.path` only if it is in this process."""
    return [sys.executable, *([] if sys.path[:1] in ([""], [os.getcwd()]) else ["-P"])]


class Guarded:
    """A command under a guard: `start` runs it, `stop` or `kill` ends it, and `start` may run it again.

    Any thread may call its methods.

    Args:
        name: Name for messages, such as "SGLang server default/0".
        stop_s: Seconds between TERM and KILL when the command is stopped.
        orphan_s: The same if this process has ended; None: as `stop_s`.
        leftover_s: The same for processes that the command leaves behind when it ends.
        log: File for the output of all starts, appended; None: each start chooses its outputs.
        cap: Bytes of output to keep, with secrets masked; 0: all output is kept unchanged.
        pid_as: Environment variable that is set to the command's process id.
        program: Python's arguments for a guard that becomes the command itself (`execute` of `guard.main`).
        shared: Prefix of the names of in-memory files that its processes map; the files are removed when they end.
        error: Exception class to raise.
    """

    def __init__(
        self,
        name: str,
        *,
        stop_s: float = 2.0,
        orphan_s: float | None = None,
        leftover_s: float = 1.0,
        log: Path | None = None,
        cap: int = 0,
        pid_as: str = "",
        shared: str = "",
        program: Sequence[str] = (guard.__file__,),
        error: type[SlimeError] = SlimeError,
    ) -> None:
        self.name = name
        self.log = log
        self.starts = 0
        """Number of starts."""
        self.begin = 0
        """Byte of the log at which the output of the last start begins."""
        self._times = guard.Times(stop_s, stop_s if orphan_s is None else orphan_s, leftover_s)
        self._cap = cap
        given = {"--pid-as": pid_as, "--shared": shared}
        self._options = [word for option in given.items() if option[1] for word in option]
        self._program, self._error = program, error
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._child: int | None = None
        self._retired = False

    # -- what it is ------------------------------------------------------------------------------------------

    def poll(self) -> int | None:
        """Return the exit status, 128 + number for a signal; None while any process runs, and before a start."""
        code = None if self._process is None else self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def alive(self) -> bool:
        """Return True while any process of the command runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Return the guard's process id; None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def child(self) -> int:
        """Wait for the guard to report the command's process id and return it; 0 if the command ended before that."""
        with self._lock:
            if self._child is None and self._control is not None:
                self._control.settimeout(_START_S)
                with contextlib.suppress(OSError):
                    self._child = int(self._control.recv(32).partition(b"\n")[0] or 0)
            return self._child or 0

    @property
    def stdin(self) -> Any:
        """Return the command's standard input, if it was requested as a pipe."""
        assert self._process is not None
        return self._process.stdin

    def ending(self) -> str:
        """Return a description of its end, such as "exited with status 1"; "is running" before the end."""
        code = self.poll()
        if code is None:
            return "is running" if self._process is not None else "was never started"
        number = signal_of(code)
        return f"exited with status {code}" if number is None else f"was killed by signal {number} ({number.name})"

    # -- what is done to it ----------------------------------------------------------------------------------

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        only: Sequence[int] = (),
    ) -> None:
        """Run `argv`; standard output and error go to the log, if there is one.

        Args:
            argv: Program and arguments.
            environment: The whole environment; None: this process's.
            stdin: Descriptor, or a value that `subprocess` accepts.
            stdout: As `stdin`; None: this process's.
            stderr: As `stdout`.
            only: Additional descriptors that it inherits. The caller closes them afterwards.

        Raises:
            SlimeError: The command already runs, has been retired, or no process can be started.
        """
        with self._lock:
            if self.alive or self._retired:
                raise self._error(f"{self.name} {'runs already' if self.alive else 'has been stopped for good'}")
            self._close()
            self._child = None
            try:
                with self._log(argv) if self.log else contextlib.nullcontext() as log:
                    out, err = (log.fileno(), subprocess.STDOUT) if log else (stdout, stderr)
                    out, err = leftovers.own(1) if out is None else out, leftovers.own(2) if err is None else err
                    self._spawn(argv, only, stdin=stdin, stdout=out, stderr=err, env=environment)
            except OSError as error:
                self._close()
                raise self._error(f"{self.name} cannot be started: {error}") from error
            self.starts += 1

    def signal(self, number: int) -> None:
        """Send a signal to the command itself, if it runs."""
        if self.alive and (child := self.child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end and return `poll`; return None after the given seconds."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        return self.poll()

    def ask_to_stop(self) -> None:
        """Begin `stop` and return at once, so that several commands can end at the same time."""
        self._tell(guard.STOP)

    def ask_to_die(self) -> None:
        """Begin `kill` and return at once."""
        self._tell(guard.KILL)

    def stop(self) -> None:
        """End the command with TERM, then with KILL after `stop_s`; return when no process of it runs. Safe twice.

        Raises:
            SlimeError: The kernel did not end the processes in time.
        """
        self._end(guard.STOP, self._times.stop)

    def kill(self) -> None:
        """Kill it at once, even if frozen; return when no process of it runs. Raises SlimeError as `stop` does."""
        self._end(guard.KILL, 0.0)

    def retire(self) -> None:
        """Stop it and refuse all later starts, even from a waiting thread. Safe twice. Raises SlimeError."""
        with self._lock:
            self._retired = True
        self.stop()

    def _log(self, argv: Sequence[str]) -> IO[bytes]:
        assert self.log is not None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = self.log.open("ab")
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        log.write(hidden(f"=== {when} {self.name}, start {self.starts + 1}: {shlex.join(argv)}\n").encode())
        log.flush()
        self.begin = log.tell()
        return log

    def _spawn(self, argv: Sequence[str], only: Sequence[int], env: Mapping[str, str] | None, **keywords: Any) -> None:
        self._control, theirs = socket.socketpair()
        options = ["--control", str(theirs.fileno()), "--parent", str(os.getpid()), *self._options]
        options += ["--times", ",".join(map(str, self._times)), "--only", ",".join(map(str, only))]
        own = {name: value for name, value in (os.environ if env is None else env).items() if name != leftovers.MARK}
        with theirs, os.fdopen(in_memory(), "rb") as known:
            passed = [theirs.fileno(), *only]
            if self._cap:
                passed.append(known.fileno())
                options += ["--cap", str(self._cap), "--hidden", str(known.fileno())]
            # In a separate session, so that only this process handles an interrupt from the terminal.
            self._process = popen(
                [sys.executable, "-I", "-S", *self._program, *options, "--", *argv],
                pass_fds=passed, start_new_session=True, env=own, **keywords,
            )  # fmt: skip

    def _tell(self, what: bytes) -> None:
        with self._lock:
            if self._control is not None and self.alive:
                with contextlib.suppress(OSError):  # it has just ended
                    self._control.sendall(what)

    def _end(self, how: bytes, seconds: float) -> None:
        process = self._process
        self._tell(how)
        if process is not None:
            try:
                process.wait(seconds + 4 * self._times.leftover + _MARGIN_S)
            except subprocess.TimeoutExpired:
                raise self._error(f"{self.name} (guard {process.pid}) did not end in time") from None
        with self._lock:
            if process is self._process:
                self._close()

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


popen = subprocess.Popen
"""Function that starts guards."""


def signal_of(code: int) -> signal.Signals | None:
    """Return the signal in an exit status as shells encode it (128 + number); None if there is no such signal."""
    try:
        return signal.Signals(code - 128)
    except ValueError:
        return None
