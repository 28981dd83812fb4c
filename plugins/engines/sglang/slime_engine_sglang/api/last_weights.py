"""The weights that the servers serve, kept on this host for a server that has to be brought up to date later.

Kept under `--use-fault-tolerance` only, and at the price of one copy of the weights in host memory (tensor and
distributed transports), or of a directory that stays until the next version is served (disk; `weights/sync.py` removes
it). The supervisor calls
`catch_up` from a thread of its own, holding `pool.update_lock`; so it does not use the engine's connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from slime_core.errors import WeightSyncError
from slime_core.models.hf_io import read_weights
from slime_engine_sglang.api import weight_protocol
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.weight_buckets import Bucket, Named
from slime_engine_sglang.api.weight_disk import directory_body
from slime_engine_sglang.api.weight_distributed import send_alone
from slime_engine_sglang.api.weight_protocol import ServerFacts, call, served_version, server_facts
from slime_engine_sglang.api.weight_round import Round
from slime_engine_sglang.api.weight_tensor import bucket_body
from slime_engine_sglang.api.worker import Worker, WorkerPool


class LastWeights:
    """Version `version`, in buckets or in a directory."""

    def __init__(
        self, version: int, timeout: float, *, buckets: Sequence[Bucket] = (), directory: Path | None = None
    ) -> None:
        """`timeout`: seconds for each step of a server; `buckets` may still be filled until the update is over."""
        self.version = version
        self._timeout = timeout
        self._buckets = buckets
        self._directory = directory

    async def catch_up(self, worker: Worker) -> None:
        """Have a server that generates nothing take these weights; sets `worker.weight_version`, not its state.

        Raises:
            EngineError: It does not answer or refuses.
            WeightSyncError: It serves something else afterwards.
        """
        http = Http(timeout=self._timeout)
        await http.open()
        try:
            await self._catch_up(http, worker)
        finally:
            await http.close()

    async def _catch_up(self, http: Http, worker: Worker) -> None:
        url, version = worker.url, str(self.version)
        facts = await server_facts(http, url)
        worker.software, worker.weight_version = facts.software, None
        if facts.is_sglang:
            await call(http, url, "/pause_generation", {"mode": "abort"}, timeout=self._timeout)
        if self._directory is not None:
            body = directory_body(self._directory, facts, version)
            await call(http, url, "/update_weights_from_disk", body, timeout=self._timeout)
        else:
            await weight_protocol.begin_update(http, url, facts, timeout=self._timeout)
            try:
                await self._send(http, worker, facts)
            finally:
                await weight_protocol.end_update(http, url, facts, timeout=self._timeout)
        await weight_protocol.flush_cache(http, url, facts)
        await call(http, url, "/continue_generation", {}, timeout=self._timeout)
        found = await served_version(http, url)
        if found != version:
            raise WeightSyncError(f"{url} reports weight version {found!r} after an update to {version}")
        worker.weight_version = self.version

    async def _send(self, http: Http, worker: Worker, facts: ServerFacts) -> None:
        """All buckets: through shared memory to a server that we launched, by broadcast to another."""
        version, limit = str(self.version), self._timeout
        if not worker.owned:
            round_ = Round(
                http, WorkerPool([]), [worker],
                version=self.version, transport="distributed", timeout=limit, tolerant=False,
            )  # fmt: skip
            round_.facts[worker] = facts
            return await send_alone(round_, worker, self._buckets)
        for bucket in self._buckets:
            body = bucket_body(bucket, facts, version if bucket is self._buckets[-1] else None)
            await call(http, worker.url, "/update_weights_from_tensor", body, timeout=limit)

    def named(self) -> Iterator[Named] | None:
        """The tensors themselves; None when they are not on this host, as with deltas."""
        if self._directory is not None:
            return read_weights(self._directory)
        return chain.from_iterable(bucket.named() for bucket in self._buckets) if self._buckets else None

    def free(self) -> None:
        """Give the memory back; the next version is served. Safe to call twice."""
        buckets, self._buckets = self._buckets, ()
        for bucket in buckets:
            bucket.free()
