"""A kept process that answers HTTP at ports which are reserved for it: started, waited for, started again.

`programs` says what to run and what "ready" means. A server is alive while its process runs, and ready when it does its
work; waiting ends with the first of ready, dead and out of time.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slime_core.errors import EngineError
from slime_core.ports import PortBlock, reserve, url_host
from slime_core.procs.guarded import Guarded, signal_of
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.log_tail import LogTail

GRACE_S = 2.0
"""From TERM to KILL. SGLang would take 5 to 7 seconds, of which it sleeps 5, and has nothing to save."""
PORT_TRIES = 4
"""Starts with new ports, when somebody else has taken one of ours."""
_POLL_S = 0.1
_REQUEST_S = 30.0
_SHARED = "/dev/shm/sglang_loads_"
"""Start of a file that each of SGLang's schedulers makes (its managers/load_snapshot.py) and nobody removes."""
_TRAINERS = re.compile(
    "((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*)", re.DOTALL
)
"""Set by torchrun for the trainer; torch in the server would take them for its own. With TORCHELASTIC_USE_AGENT_STORE a
server would wait for ever for the agent to open a store at its own port."""


class StrangerError(EngineError):
    """Somebody else answers at our port."""


@dataclass(frozen=True)
class Place:
    """What the programs of one run share."""

    python: Path
    """Interpreter of SGLang's environment."""
    directory: Path
    """For the logs of all starts: NAME.log."""
    timeout: float
    """Seconds until each must be ready."""
    host: str = "127.0.0.1"
    """Address to listen at."""


class Service(ABC):
    """One program that answers at `url` once it is ready."""

    ready_path = "/health"
    """Answers 200 then, unless a subclass has its own `check`."""

    def __init__(
        self, name: str, label: str, place: Place, *, ports: int, port: int | None = None, grace: float = GRACE_S
    ) -> None:
        """Reserves the ports, and starts nothing.

        Args:
            name: For events.
            label: For messages.
            place: Of the run.
            ports: How many ports it takes; it answers at the first.
            port: The first port, where the user has chosen it.
            grace: Seconds from TERM to KILL.

        Raises:
            EngineError: A port is taken.
        """
        self.name, self._label, self._place = name, label, place
        self.host = place.host
        self.log = log = place.directory / f"{name}.log"
        """Output of all its starts."""
        self._process = Guarded(label, stop_s=grace, log=log, shared=_SHARED, error=EngineError)
        self._reserve = partial(reserve, ports, first=port)
        self._ports = self._reserve()
        self._usurped = False
        """Somebody else answers there."""

    # -- what a subclass says ------------------------------------------------------------------------------

    @abstractmethod
    def command(self, ports: PortBlock) -> list[str]:
        """Program and arguments; it listens at `ports[0]` of `host`."""

    def environment(self) -> Mapping[str, str]:
        """Added to this process's environment."""
        return {}

    async def check(self, http: Http, left: float) -> None:
        """Return when it is ready; may take `left` seconds. Raises StrangerError; EngineError says what is missing."""
        await http.send("GET", self.url, self.ready_path, timeout=left, attempts=1)

    # -- life ----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """http://HOST:PORT, known before it is started; another one after a start that had to change ports."""
        return f"http://{url_host(self.host)}:{self._ports[0]}"

    @property
    def port(self) -> int:
        """The port it answers at."""
        return self._ports[0]

    @property
    def pid(self) -> int | None:
        """Process id of its guard."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended; a frozen one is alive."""
        return self._process.alive

    @property
    def _tail(self) -> LogTail:
        """The end of the log of the last start."""
        return LogTail.of(self.log, self._process.begin)

    def last_words(self) -> str:
        """How it ended, and the end of its log."""
        tail = self._tail
        killed = signal_of(self._process.poll() or 0) is not None  # of which its log tells nothing
        said = f"; {tail.end()}" if killed else f": {tail.describe()}"
        return self._process.ending() + said

    def start(self) -> None:
        """Start it, at the ports of before unless it ended because one was taken. Raises EngineError."""
        if self._process.starts and not self.alive and (self._usurped or self._tail.address_in_use):
            self._usurped = False
            self._ports.close()
            self._ports = self._reserve()
        inherited = {name: value for name, value in os.environ.items() if not _TRAINERS.fullmatch(name)}
        # Servers call themselves while they start, which no proxy can do for them.
        known = inherited.get("NO_PROXY") or inherited.get("no_proxy")
        direct = ",".join(filter(None, [known, "localhost", self.host]))
        # Nothing that happens to lie in the working directory is imported.
        ours = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "NO_PROXY": direct, "no_proxy": direct}
        self._process.start(self.command(self._ports), inherited | ours | dict(self.environment()))

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Until it is ready.

        Args:
            timeout: Seconds; by default --engine-start-timeout.

        Raises:
            EngineError: It ended, or is not ready in time; says what was waited for and how its log ends.
        """
        began, limit = time.monotonic(), self._place.timeout if timeout is None else timeout
        waiting = "it has not answered"
        async with Http() as http:
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
        """`start` and `wait_ready`, with new ports when somebody has taken one. Raises EngineError."""
        for attempt in range(1, PORT_TRIES + 1):
            await asyncio.to_thread(self.start)
            try:
                return await self.wait_ready()
            except StrangerError:
                self._usurped = True
                await asyncio.to_thread(self.kill)
                if attempt == 2:  # at other ports, too: it is our own that is not what it should be
                    raise
            except EngineError:
                if self.alive or not self._tail.address_in_use or attempt == PORT_TRIES:
                    raise

    async def restart(self) -> None:
        """End what runs of it by force and launch it again, at the same address if that is free. Raises EngineError."""
        await asyncio.to_thread(self.kill)
        await self.launch()

    def ask_to_stop(self) -> None:
        """Begin to stop, so that several stop at the same time."""
        self._process.ask_to_stop()

    def stop(self) -> None:
        """End it gently, by force if need be; returns when nothing of it runs. Safe twice. Raises EngineError."""
        self._process.stop()

    def kill(self) -> None:
        """End it at once; returns when nothing of it runs. Raises EngineError."""
        self._process.kill()

    def close(self) -> None:
        """`stop`, and give its ports back; it is never started again."""
        try:
            self._process.retire()
        finally:
            self._ports.close()
