"""A Python process that answers requests over a socket, and is killed with all that it started.

`Worker` is this side, `serve` the other one, so that prints of user code disturb nothing. What a reader would get
wrong: it is a fresh interpreter with this one's `sys.path`, and knows nothing else of this process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slime_core.procs.guarded import Guarded, signal_of
from slime_core.procs.leftovers import OUTPUT

HEADER = struct.Struct("!Q")
"""Before each message: its length."""
_POLL = 0.5
_CLOSED_S = 2.0
"""For a process that has closed its socket to be gone."""
_BOOT = "import sys; sys.path[:] = {path!r}; from {module} import main; main({descriptor})"
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 where the user has not: several processes share the cores."""


class WorkerDied(Exception):
    """The process ended during the call; the text says how."""

    killed = False
    """A signal ended it."""


class Worker:
    """One process; used by one thread at a time, but for `kill`.

    Args:
        name: For messages.
        module: Its `main(descriptor)` calls `serve`.
    """

    def __init__(self, name: str, module: str) -> None:
        self.usable = True
        self._received = bytearray()
        self.process = Guarded(name, stop_s=0.0, leftover_s=0.0, cap=OUTPUT)
        self.sock, theirs = socket.socketpair()
        with theirs:
            boot = _BOOT.format(path=sys.path, module=module, descriptor=theirs.fileno())
            self.process.start(
                [sys.executable, "-P", "-c", boot],
                {**dict.fromkeys(_THREADS, "1"), **os.environ},
                stdout=subprocess.DEVNULL,
                only=[theirs.fileno()],
            )

    def ask(self, request: tuple[Any, ...], timeout: float | None) -> Any:
        """The answer to a request, both pickled. Raises as `ask_all` does."""
        return next(self.ask_all([pickle.dumps(request)], timeout))

    def ask_all(self, requests: Sequence[bytes], timeout: float | None) -> Iterator[Any]:
        """The answers to pickled requests that are sent at once, as they come; each has `timeout` from the one before.

        All are to be taken. Requests but for the first are to fit into the socket's memory together.

        Raises:
            TimeoutError: One did not come in time; the process is of no use any more.
            WorkerDied: It has ended.
        """
        with self._watched():
            self.sock.settimeout(timeout)
            until = None if timeout is None else time.monotonic() + timeout
            self.sock.sendall(b"".join(part for request in requests for part in (HEADER.pack(len(request)), request)))
        for _ in requests:
            with self._watched():
                size = HEADER.unpack(self._receive(HEADER.size, until))[0]
                answer = pickle.loads(self._receive(size, until))
            yield answer
            until = None if timeout is None else time.monotonic() + timeout

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """What goes wrong inside makes the process useless: half an answer may be left in the socket."""
        try:
            yield
        except OSError as error:
            self.usable = False
            if isinstance(error, TimeoutError):
                raise
            raise self._fate() from None
        except BaseException:
            self.usable = False
            raise

    @property
    def has_answer(self) -> bool:
        """Something of the next answer is here."""
        return bool(self._received)

    def kill(self) -> None:
        """Have it end with all it started; from any thread."""
        self.process.ask_to_die()

    def end(self) -> None:
        """Kill, wait, close. Raises SlimeError when the kernel does not let go of it."""
        self.process.kill()
        self.sock.close()

    def _receive(self, size: int, until: float | None) -> bytes:
        while len(self._received) < size:
            rest = _POLL if until is None else min(_POLL, until - time.monotonic())
            if not select.select([self.sock], [], [], max(rest, 0.0))[0]:
                if rest <= 0:  # only now: after a standstill of this process the answer may be there
                    raise TimeoutError
                continue
            part = self.sock.recv(1 << 20)
            if not part:
                raise ConnectionResetError("closed")
            self._received += part
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def _fate(self) -> WorkerDied:
        """How the process ended; one that only closed its socket is killed."""
        status = self.process.wait(_CLOSED_S)
        self.end()
        if status is None:
            return WorkerDied("the worker process closed its connection")
        number = signal_of(status)
        if number is None:
            return WorkerDied(f"the worker process ended with exit status {status}")
        hint = " (out of memory?)" if number == signal.SIGKILL else ""
        died = WorkerDied(f"the worker process was ended by signal {number.name}{hint}")
        died.killed = True
        return died


def send(sock: socket.socket, message: bytes) -> None:
    """One message."""
    sock.sendall(HEADER.pack(len(message)) + message)


def serve(descriptor: int, answer: Callable[[bytes], bytes]) -> None:
    """In the process: answer messages until the other side is gone. Never returns."""
    os.set_inheritable(descriptor, False)
    sock = socket.socket(fileno=descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel's first choice when memory runs out.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    with contextlib.suppress(ConnectionError), sock.makefile("rb") as requests:
        while len(header := requests.read(HEADER.size)) == HEADER.size:
            size = HEADER.unpack(header)[0]
            if len(message := requests.read(size)) < size:
                break
            send(sock, answer(message))
    os._exit(0)  # without the exit handlers of user code, which may hang
