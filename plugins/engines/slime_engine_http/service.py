"""A long-running process that answers HTTP at reserved ports: start it, wait for it, restart it.

`programs` defines the commands and the checks for "ready". A server is alive while its process runs, and ready when it
passes its check. A wait ends when the server is ready, has died, or is out of time.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from slime_core.errors import EngineError
from slime_core.workers.process import Guarded, signal_of
from slime_engine_http.api.transport import Http, address_towards
from slime_engine_http.log_tail import LogTail
from slime_engine_http.ports import PortBlock, reserve, url_host

DIRECTORY = "engines"
"""Folder of the logs, in the run directory."""
GRACE_S = 2.0
"""Seconds from TERM to KILL; a server has nothing to save."""
PORT_TRIES = 4
"""Maximum number of starts with new ports, when another process has taken a port."""
_POLL_S = 0.1
_REQUEST_S = 30.0
_TRAINERS = re.compile(
    "((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*)", re.DOTALL
)
"""Variables that torchrun sets for the trainer; torch in the server would use them by mistake. With
TORCHELASTIC_USE_AGENT_STORE a server would wait forever for the agent to open a store at the server's own port."""


class StrangerError(EngineError):
    """Raised if another server answers at the port."""


@dataclass(frozen=True)
class Place:
    """The settings that all programs of a run share."""

    python: Path
    """Interpreter of the servers' environment."""
    directory: Path
    """Directory of the logs of all starts, NAME.log."""
    timeout: float
    """Seconds in which each program must become ready."""
    host: str = "127.0.0.1"
    """Address to listen at."""


class Service(ABC):
    """A program that answers at `url` once it is ready."""

    http_class: ClassVar[type[Http]] = Http
    ready_path = "/health"
    """Path that answers 200 once the program is ready, unless a subclass has its own `check`."""

    def __init__(
        self, name: str, label: str, place: Place, *, ports: int, port: int | None = None, grace: float = GRACE_S,
        shared: str = "",
    ) -> None:  # fmt: skip
        """Reserve the ports without starting the program.

        Args:
            name: Name in events and of the log.
            label: Name in messages.
            place: Shared settings of the run.
            ports: Number of ports; the program answers at the first.
            port: The first port, if the user chose it.
            grace: Seconds from TERM to KILL.
            shared: Prefix of shared memory that the program's processes map and may leave; empty: none.

        Raises:
            EngineError: A port is taken.
        """
        self.name, self._label, self._place = name, label, place
        self.host = place.host
        self.log = log = place.directory / f"{name}.log"
        """Log with the output of all starts."""
        self._process = Guarded(label, stop_s=grace, log=log, shared=shared, error=EngineError)
        self._reserve = partial(reserve, ports, first=port)
        self._ports = self._reserve()
        self._usurped = False
        """True if another server answered at the port."""

    # -- defined by subclasses -----------------------------------------------------------------------------

    @abstractmethod
    def command(self, ports: PortBlock) -> list[str]:
        """Return program and arguments; the program must listen at `ports[0]` of `host`."""

    def environment(self) -> Mapping[str, str]:
        """Return variables to add to this process's environment."""
        return {}

    async def check(self, http: Http, left: float) -> None:
        """Return if the program is ready; may take `left` seconds. Raises StrangerError; EngineError if not ready."""
        await http.send("GET", self.url, self.ready_path, timeout=left, attempts=1)

    # -- life ----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """URL http://HOST:PORT, known before the start; it changes if a start has to change ports."""
        return f"http://{url_host(self.host)}:{self._ports[0]}"

    @property
    def port(self) -> int:
        """Port at which the program answers."""
        return self._ports[0]

    @property
    def pid(self) -> int | None:
        """Process id of the program's guard."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if the process has not ended; a frozen process is alive."""
        return self._process.alive

    @property
    def _tail(self) -> LogTail:
        """End of the log of the last start."""
        return LogTail.of(self.log, self._process.begin)

    def last_words(self) -> str:
        """Return how the process ended, and the end of its log."""
        tail = self._tail
        killed = signal_of(self._process.poll() or 0) is not None  # the log does not show a kill
        said = f"; {tail.end()}" if killed else f": {tail.describe()}"
        return self._process.ending() + said

    def start(self) -> None:
        """Start the program, at the same ports unless it ended because a port was taken. Raises EngineError."""
        if self._process.starts and not self.alive and (self._usurped or self._tail.address_in_use):
            self._usurped = False
            self._ports.close()
            self._ports = self._reserve()
        inherited = {name: value for name, value in os.environ.items() if not _TRAINERS.fullmatch(name)}
        # Servers call themselves while they start, and these calls must bypass proxies.
        known = inherited.get("NO_PROXY") or inherited.get("no_proxy")
        direct = ",".join(filter(None, [known, "localhost", self.host]))
        # PYTHONSAFEPATH: do not import modules from the working directory.
        ours = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "NO_PROXY": direct, "no_proxy": direct}
        self._process.start(self.command(self._ports), inherited | ours | dict(self.environment()))

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the program is ready.

        Args:
            timeout: Seconds; by default --engine-start-timeout.

        Raises:
            EngineError: It ended, or is not ready in time; the message has the last problem and the end of the log.
        """
        began, limit = time.monotonic(), self._place.timeout if timeout is None else timeout
        waiting = "it has not answered"
        async with self.http_class() as http:
            while True:
                left = began + limit - time.monotonic()
                if not self.alive:
                    spent = time.monotonic() - began
                    raise EngineError(f"{self._label} did not come up: after {spent:.0f} s it {self.last_words()}")
                if left <= 0:
                    raise EngineError(
                        f"{self._label} is running, but not ready after {limit:.0f} s (--engine-start-timeout);"
                        f" {waiting}: {self._tail.describe()}"
                    )
                try:
                    return await self.check(http, min(left, _REQUEST_S))
                except StrangerError:
                    raise
                except EngineError as error:
                    waiting = f"last answer: {error}"
                await asyncio.sleep(_POLL_S)

    async def launch(self) -> None:
        """Start the program and wait until it is ready; use new ports if a port is taken. Raises EngineError."""
        for attempt in range(1, PORT_TRIES + 1):
            await asyncio.to_thread(self.start)
            try:
                return await self.wait_ready()
            except StrangerError:
                self._usurped = True
                await asyncio.to_thread(self.kill)
                if attempt == 2:  # new ports did not help, so the program itself is wrong
                    raise
            except EngineError:
                if self.alive or not self._tail.address_in_use or attempt == PORT_TRIES:
                    raise

    async def restart(self) -> None:
        """Kill all its processes and launch it again, at the same address if that is free. Raises EngineError."""
        await asyncio.to_thread(self.kill)
        await self.launch()

    def ask_to_stop(self) -> None:
        """Ask the program to stop without waiting, so that several can stop at the same time."""
        self._process.ask_to_stop()

    def stop(self) -> None:
        """Stop the program, by force if necessary, and wait for its processes; safe twice. Raises EngineError."""
        self._process.stop()

    def kill(self) -> None:
        """Kill the program at once and wait until all its processes have ended. Raises EngineError."""
        self._process.kill()

    def close(self) -> None:
        """Stop the program and release its ports; it cannot be started again."""
        try:
            self._process.retire()
        finally:
            self._ports.close()


def stop_all(services: Sequence[Service]) -> None:
    """End all services concurrently; nothing runs when it returns. Safe to call twice. Raises EngineError."""
    for service in services:
        service.ask_to_stop()
    problems = []
    for service in services:
        try:
            service.close()
        except EngineError as error:
            problems.append(str(error))
    if problems:
        raise EngineError("; ".join(problems))


async def together(calls: list[Coroutine[Any, Any, None]]) -> None:
    """Await all coroutines concurrently; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def own_address(toward: str | None) -> str:
    """Return the address at which servers of this machine listen: loopback, unless a client is on another machine.

    Args:
        toward: Host of a router that is running already; None if everything is on this machine.

    Returns:
        SLIME_HOST_IP if it is set, as in THUDM/slime; else this machine's address on the route to `toward`.
    """
    named = os.environ.get("SLIME_HOST_IP")
    if named:
        return named
    if toward is None:
        return "127.0.0.1"
    try:
        return address_towards(toward)
    except OSError as error:
        raise EngineError(f"--sglang-router-ip {toward!r} cannot be reached from this machine: {error}") from error
