"""What the servers serve, read back and compared with what was trained: `--check-weight-update-equal`.

    trained tensors, a bucket at a time --names and shapes--> every server (`readers`)
    each server --> where it holds which elements of them, and checksums of that
    the same elements of the trained tensors, in the served dtype --> checksums --> equal?

`HttpEngine` calls it after each push, and before a server that was brought back is readmitted. A server with other
weights is quarantined here, as one that failed the update; whether the run goes on without it is decided as there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.protocols import Args
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_sglang.weights.buckets import Named, group_tensors
from slime_engine_sglang.weights.protocol import call
from slime_engine_sglang.weights.readers import Finding, Reader, Trained, Unverifiable, reader_of

logger = logging.getLogger(__name__)

_SHOWN = 5


class WeightCheck:
    """Of one pool; `wanted` says whether `--check-weight-update-equal` was given."""

    def __init__(self, http: Http, pool: WorkerPool, args: Args) -> None:
        self._http, self._pool = http, pool
        self._timeout = float(args.update_weight_timeout)
        self._bucket_bytes = int(args.update_weight_buffer_size)
        self._tolerant = bool(args.use_fault_tolerance)
        self.wanted = bool(args.check_weight_update_equal)

    async def require(self) -> None:
        """Raise ConfigError naming a ready server that cannot tell what it serves, and why. Raises EngineError."""
        try:
            await asyncio.gather(*(reader_of(self._http, worker, self._timeout) for worker in self._pool.ready))
        except Unverifiable as error:
            raise ConfigError(f"--check-weight-update-equal: {error}") from error

    async def differing(self, weights: Iterable[Named]) -> list[str]:
        """Compare every ready server; quarantine those that serve something else, or do not answer.

        Returns:
            "NAME (URL, ...)" of each tensor that differs; nothing under fault tolerance, as long as a server is left
            or will be brought back.

        Raises:
            WeightSyncError: A server did not tell.
        """
        pool, where, silent = self._pool, dict[str, list[str]](), list[str]()
        for worker, result in (await self._compare(self._http, pool.ready, weights)).items():
            if isinstance(result, Finding):
                if not result.names:
                    continue
                reason = f"it serves {_listed(result.names)} otherwise than trained"
                for name in result.names:
                    where.setdefault(name, []).append(worker.url)
            else:
                reason = f"what it serves could not be read back: {result}"
                if self._tolerant or not worker.awaited or result.status is not None:  # else it is gone, and waited for
                    silent.append(f"{worker.url}: {reason}")
            worker.weight_version = None
            pool.set_state(worker, WorkerState.QUARANTINED, reason)
            logger.warning("engine %s is quarantined: %s", worker.url, reason)
            await self._silence(worker)
        if self._tolerant and (pool.ready or pool.recovering):
            return []
        if silent:
            raise WeightSyncError("; ".join(silent))
        return [f"{name} ({', '.join(urls)})" for name, urls in sorted(where.items())]

    async def one(self, worker: Worker, weights: Iterable[Named]) -> None:
        """Compare a server that is brought back; from any thread. Raises WeightSyncError, EngineError."""
        async with Http(timeout=self._timeout) as http:
            result = (await self._compare(http, [worker], weights))[worker]
        if not isinstance(result, Finding):
            raise result
        if result.names:
            raise WeightSyncError(f"{worker.url} serves {_listed(result.names)} otherwise than trained")

    async def _compare(
        self, http: Http, workers: Sequence[Worker], weights: Iterable[Named]
    ) -> dict[Worker, Finding | EngineError]:
        return await compare(http, workers, weights, bucket_bytes=self._bucket_bytes, timeout=self._timeout)

    async def _silence(self, worker: Worker) -> None:
        """Whatever it holds must not serve, also not what a router sends there."""
        for path, body in (("/pause_generation", {"mode": "abort"}), ("/abort_request", {"abort_all": True})):
            with contextlib.suppress(EngineError):
                await call(self._http, worker.url, path, body, timeout=min(self._timeout, 5.0))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


async def compare(
    http: Http, workers: Sequence[Worker], weights: Iterable[Named], *, bucket_bytes: int, timeout: float
) -> dict[Worker, Finding | EngineError]:
    """Each server's finding, or why there is none. Consumes `weights`, in buckets of `bucket_bytes`.

    `timeout`: seconds for each request to a server.
    """
    readers: dict[Worker, Reader | EngineError] = dict(
        zip(workers, await _gather(reader_of(http, worker, timeout) for worker in workers))
    )
    for run, _ in group_tensors(weights, bucket_bytes):
        live = {worker: reader for worker, reader in readers.items() if isinstance(reader, Reader)}
        served = dict(zip(live, await _gather(reader.ask(run) for reader in live.values())))
        trained = Trained(run)
        for worker, reader in live.items():
            pieces = served[worker]
            if isinstance(pieces, EngineError):
                readers[worker] = pieces
            else:
                # The loop has requests to serve meanwhile.
                await asyncio.to_thread(reader.judge, trained, pieces)
        del run, trained
    return {w: reader if isinstance(reader, EngineError) else reader.finding() for w, reader in readers.items()}


async def _gather(calls: Iterable[Any]) -> list[Any]:
    """Results, with EngineErrors in their places."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
    return results
