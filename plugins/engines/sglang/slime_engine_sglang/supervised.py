"""What the supervisor is given: each model's servers, and what stands behind them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slime_engine_sglang.api.worker import Worker, WorkerPool


class Process(Protocol):
    """A server or a router that we launched; what blocks is called in a thread."""

    @property
    def name(self) -> str:
        """For logs and events."""

    @property
    def url(self) -> str:
        """http://HOST:PORT; may be another one after `start`."""

    @property
    def alive(self) -> bool:
        """Whether it has not ended; one that was stopped by a signal is alive."""

    def last_words(self) -> str:
        """How it ended, and the end of its log."""

    def kill(self) -> None:
        """End it and its children by force; returns when they are gone. Raises EngineError."""

    async def restart(self) -> None:
        """`kill`, start anew, and wait until it is ready. Raises EngineError."""


class RouterLike(Process, Protocol):
    """The router's process; it keeps its address."""

    def start_with(self, urls: Sequence[str]) -> None:
        """Workers for its next start, which it may need to begin at all."""


@dataclass
class Supervised:
    """One model: its workers and what stands behind them."""

    name: str
    pool: WorkerPool
    servers: Mapping[Worker, Process]
    """Of the workers we own."""
    router_url: str | None = None
    router_process: RouterLike | None = None
    """Of the router that we launched; it keeps its address when it is restarted."""
    catch_up: Callable[[Worker], Awaitable[None]] | None = None
    """Gives a worker the weights of `pool.version_wanted`; None for a model that is never updated."""
    companions: Sequence[Process] = ()
    """Servers of ours that answer no requests for tokens: encoders, further nodes of an engine."""

    def name_of(self, worker: Worker) -> str:
        """For logs and events."""
        return self.servers[worker].name if worker in self.servers else f"external server of {self.name}"
