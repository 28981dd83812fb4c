"""A guarded Python process that answers requests over a socket, for code of users that may hang or end its process.

`Worker` is the caller's side, and `serve` the side of the process. It is a fresh interpreter: it gets `sys.path` of the
caller, and no other state. The socket keeps prints of user code out of the answers.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slime_core.workers import leftovers
from slime_core.workers.process import Guarded, readable, signal_of

__all__ = ["HEADER", "Worker", "WorkerDied", "send", "serve"]

HEADER = struct.Struct("!Q")
"""Format of the length before each message."""
_POLL = 0.5
_CLOSED_S = 2.0
"""Seconds that a process gets to end after it has closed its socket."""
_BOOT = "import sys; sys.path[:] = {path!r}; from {module} import main; main({descriptor})"
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables set to 1 unless the user set them, because several processes share the cores."""


class WorkerDied(Exception):
    """Raised if the process ended during the call; the message says how."""

    killed = False
    """True if a signal ended the process."""


class Worker:
    """A worker process. One thread may use it at a time; any thread may call `kill`.

    Args:
        name: Name of the process in messages.
        module: Module to run in the process; its `main(descriptor)` calls `serve`.
    """

    def __init__(self, name: str, module: str) -> None:
        self.usable = True
        self._received = bytearray()
        self.process = Guarded(name, stop_s=0.0, leftover_s=0.0, cap=leftovers.OUTPUT)
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
        """Send a request and return the answer; both are pickled. Raises as `ask_all` does."""
        return next(self.ask_all([pickle.dumps(request)], timeout))

    def ask_all(self, requests: Sequence[bytes], timeout: float | None) -> Iterator[Any]:
        """Send all pickled requests at once and yield the answers as they arrive.

        The time of each answer is counted from the previous answer. The caller must take all answers. All requests
        after the first must fit into the socket's buffer together.

        Raises:
            TimeoutError: An answer did not arrive in time; the process cannot be used any more.
            WorkerDied: The process has ended.
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
        """Mark the process as unusable if an exception is raised: part of an answer may be left in the socket."""
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
        """True if part of the next answer has arrived."""
        return bool(self._received)

    def kill(self) -> None:
        """Ask the process to end with all processes that it started; any thread may call it."""
        self.process.ask_to_die()

    def end(self) -> None:
        """Kill the process, wait for its end and close the socket. Raises SlimeError if the kernel does not end it."""
        self.process.kill()
        self.sock.close()

    def _receive(self, size: int, until: float | None) -> bytes:
        while len(self._received) < size:
            rest = _POLL if until is None else min(_POLL, until - time.monotonic())
            if not readable([self.sock.fileno()], max(rest, 0.0)):
                if rest <= 0:  # checked after the wait: the answer may have arrived while this process stood still
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
        """Return an error that says how the process ended; kill a process that only closed its socket."""
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
    """Send a message with its length."""
    sock.sendall(HEADER.pack(len(message)) + message)


def serve(descriptor: int, answer: Callable[[bytes], bytes]) -> None:
    """Answer messages until the caller closes the socket; called in the process. Never returns."""
    os.set_inheritable(descriptor, False)
    sock = socket.socket(fileno=descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Make the kernel kill this process first when memory runs out.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    with contextlib.suppress(ConnectionError), sock.makefile("rb") as requests:
        while len(header := requests.read(HEADER.size)) == HEADER.size:
            size = HEADER.unpack(header)[0]
            if len(message := requests.read(size)) < size:
                break
            send(sock, answer(message))
    os._exit(0)  # without the exit handlers of user code, which may hang
