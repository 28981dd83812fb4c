"""A command -> a process under a keeper, with a log file of its own; shared by servers, routers and what stands beside.

The keeper (`keeper.py`) sees to it that nothing is left behind. What a reader would get wrong: `alive` speaks of the
keeper, which lives until the last descendant has gone, so when it is False ports and memory are free again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_core.errors import EngineError
from slime_core.procs import keeper
from slime_engine_sglang.log_tail import LogTail

GRACE_S = 2.0
"""From TERM to KILL. SGLang would take 5 to 7 seconds, of which it sleeps 5, and has nothing to save."""
_MARGIN_S = 10.0 + keeper.LEFTOVER_S * 4


class KeptProcess:
    """`start` runs it, `stop` or `kill` end it; then it may be started again. Methods may be called by any thread."""

    def __init__(self, name: str, log: Path, *, grace: float = GRACE_S) -> None:
        self.name = name
        """For messages and the log, such as "SGLang server default/0"."""
        self.log = log
        """Standard output and error of every start, one after the other."""
        self.starts = 0
        """How often it was started."""
        self._grace = grace
        self._lock = threading.Lock()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._begin = 0
        self._argv: list[str] = []
        self._retired = False

    @property
    def alive(self) -> bool:
        """Whether anything of it runs."""
        return self._keeper is not None and self._keeper.poll() is None

    @property
    def pid(self) -> int | None:
        """The keeper's process id; None before the first start."""
        return None if self._keeper is None else self._keeper.pid

    def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run `argv` with exactly this environment. Raises EngineError when it runs already or cannot be started."""
        with self._lock:
            if self.alive or self._retired:
                raise EngineError(f"{self.name} {'runs already' if self.alive else 'has been stopped for good'}")
            self._close()
            self.starts += 1
            self._argv = list(argv)
            try:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with self.log.open("ab") as log:
                    log.write(self._header().encode())
                    log.flush()
                    self._begin = log.tell()
                    self._spawn(environment, log.fileno())
            except OSError as error:
                raise EngineError(f"{self.name} cannot be started: {error}") from error

    def stop(self) -> None:
        """End it as it likes to end, by force after its time to do so; returns when nothing of it runs. Safe twice.

        Raises:
            EngineError: The kernel did not end it in time.
        """
        self._end(keeper.STOP, self._grace + _MARGIN_S)

    def retire(self) -> None:
        """`stop`, and never start again, not even by a thread that was about to. Safe twice. Raises EngineError."""
        with self._lock:
            self._retired = True
        self.stop()

    def kill(self) -> None:
        """End it at once, frozen or not; returns when nothing of it runs. Raises EngineError as `stop` does."""
        self._end(keeper.KILL, _MARGIN_S)

    def ask_to_stop(self) -> None:
        """Begin what `stop` does and return, so that several end at the same time."""
        with self._lock:
            self._tell(keeper.STOP)

    @property
    def tail(self) -> LogTail:
        """The end of the log of the last start."""
        return LogTail.of(self.log, self._begin)

    def ending(self) -> str:
        """How it ended, such as "exited with status 1"; "is running" while it does."""
        code = None if self._keeper is None else self._keeper.poll()
        if code is None:
            return "is running" if self._keeper is not None else "was never started"
        number = _signal_of(code)
        return f"exited with status {code}" if number is None else f"was killed by signal {number} ({number.name})"

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, of which its log tells nothing."""
        code = None if self._keeper is None else self._keeper.poll()
        return code is not None and _signal_of(code) is not None

    def _header(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        return f"=== {when} {self.name}, start {self.starts}: {shlex.join(self._argv)}\n"

    def _spawn(self, environment: Mapping[str, str], log: int) -> None:
        read, self._pipe = os.pipe()
        options = ["--pipe", str(read), "--parent", str(os.getpid()), "--grace", str(self._grace)]
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, *options, "--", *self._argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=[read],
                start_new_session=True,  # an interrupt at the terminal is slime's to handle
            )
        finally:
            os.close(read)

    def _tell(self, what: bytes) -> None:
        if self._pipe >= 0 and self.alive:
            with contextlib.suppress(BrokenPipeError):  # it has just ended
                os.write(self._pipe, what)

    def _end(self, how: bytes, seconds: float) -> None:
        with self._lock:
            process = self._keeper
            self._tell(how)
        if process is not None:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise EngineError(f"{self.name} (keeper {process.pid}) did not end within {seconds:.0f} s") from None
        with self._lock:
            if process is self._keeper:
                self._close()

    def _close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _signal_of(code: int) -> signal.Signals | None:
    """Of an exit status as shells tell it, or as `subprocess` does."""
    try:
        return signal.Signals(code - 128 if code > 128 else -code)
    except ValueError:
        return None
