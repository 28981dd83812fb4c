"""The channel between a Trainer and the loop of its run: in this process, or over a socket to another one.

Both ends have the methods `send`, `poll` and `recv` of `multiprocessing.connection.Connection`.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Protocol

VARIABLE = "CALLER_OF_SLIME"
"""Environment variable: the socket of the Trainer in whose place a process runs."""


class Channel(Protocol):
    """An end of a channel."""

    def send(self, obj: Any, /) -> None:
        """Send an object. Raises OSError if the other end has gone."""

    def poll(self, timeout: float, /) -> bool:
        """Return whether an object arrives within the seconds."""

    def recv(self) -> Any:
        """Wait for the next object. Raises EOFError if the other end has gone."""


class _End:
    """An end within the process; objects are passed as they are."""

    def __init__(self, ours: queue.SimpleQueue[Any], theirs: queue.SimpleQueue[Any]) -> None:
        self._ours, self._theirs = ours, theirs
        self._peeked: list[Any] = []

    def send(self, obj: Any, /) -> None:
        self._theirs.put(obj)

    def poll(self, timeout: float, /) -> bool:
        if not self._peeked:
            try:
                self._peeked.append(self._ours.get(timeout=timeout))
            except queue.Empty:
                return False
        return True

    def recv(self) -> Any:
        return self._peeked.pop() if self._peeked else self._ours.get(timeout=None)


def ends() -> tuple[Channel, Channel]:
    """Return the two ends of a channel within this process."""
    one, other = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    return _End(one, other), _End(other, one)


class Listening:
    """The Trainer's end of a channel to a process that has yet to connect; its folder is for this user only."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slime-"))
        self.address = str(self.folder / "caller")
        self._listener = Listener(self.address, family="AF_UNIX")
        self._connection: Connection[Any, Any] | None = None
        self._come = threading.Event()
        self._lock = threading.Lock()
        self._early: list[Any] = []
        """Objects sent before the process has connected."""
        threading.Thread(target=self._accept, name="waits for the run", daemon=True).start()

    def send(self, obj: Any, /) -> None:
        """Send an object, once the process has connected; nothing happens after its end."""
        with self._lock:
            if self._connection is None:
                self._early.append(obj)
                return
        with suppress(OSError):
            self._connection.send(obj)

    def poll(self, timeout: float, /) -> bool:
        """Return whether an object arrives within the seconds."""
        if not self._come.wait(timeout) or self._connection is None:
            return False
        try:
            return self._connection.poll(timeout)
        except OSError:
            return False

    def recv(self) -> Any:
        """Return the next object. Raises EOFError if the process has gone."""
        assert self._connection is not None, "poll comes first"
        return self._connection.recv()

    def close(self) -> None:
        """Close the socket and remove its folder."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()
        except OSError:  # closed before the process connected
            return
        with self._lock:
            self._connection = connection
            for obj in self._early:
                connection.send(obj)
        self._come.set()


def connected(address: str) -> Channel:
    """Return the run's end of a channel whose Trainer listens."""
    return Client(address, family="AF_UNIX")
