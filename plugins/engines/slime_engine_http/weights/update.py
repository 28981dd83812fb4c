"""The weight updates of an engine: lock -> a `Round` of all ready servers -> pool.version_wanted = N -> unlock.

`HttpEngine` calls it; `transports`, `distributed` and `delta` send the weights. A server that is restarted later gets a
round of its own, with the kept weights (`Kept`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.protocols import Args
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerPool
from slime_engine_http.weights.buckets import Bucket, Buffers, Named, group_tensors
from slime_engine_http.weights.check import push_compared, written
from slime_engine_http.weights.distributed import Groups, send_alone
from slime_engine_http.weights.protocol import server_facts
from slime_engine_http.weights.round import BY_FILES, CHECK, Round
from slime_engine_http.weights.transports import push_directory, push_shared

WEIGHT_SETTINGS = frozenset(
    {"update_weight_buffer_size", "update_weight_timeout", "update_weight_pause_mode", "colocate"}
)
"""Settings that only an engine with servers acts on, through `WeightUpdates`."""

Push = Callable[[Round], Awaitable[None]]
"""Function that sends the weights to the live servers of a round. Raises WeightSyncError like `Round.each`."""
Send = Callable[..., Awaitable[None]]
"""Function that sends one bucket to them: `send(round, bucket, number, last=...)`."""


@dataclass
class Kept:
    """The weights of a version, kept for a server that has to be updated later.

    They are in files that stay until the next version is served, or with `--use-fault-tolerance` in a copy in host
    memory.
    """

    version: int
    transport: str
    push: Push
    """Sends the kept weights again."""
    buckets: Sequence[Bucket] = ()
    """Kept buckets; the list may grow until the update ends."""

    def free(self) -> None:
        """Free the memory once the next version is served. Safe to call twice."""
        buckets, self.buckets = self.buckets, ()
        for bucket in buckets:
            bucket.free()


class WeightUpdates:
    """Updates the weights of a pool's servers."""

    def __init__(self, http: Http, pool: WorkerPool, args: Args) -> None:
        self._http = http
        self._pool = pool
        self._args = args
        self._timeout = float(args.update_weight_timeout)
        self._tolerant = bool(args.use_fault_tolerance)
        self._groups: Groups | None = None
        self._round: Round | None = None
        self.last: Kept | None = None
        """The weights of `pool.version_wanted`, if they are kept: with fault tolerance, or in files."""
        pool.on_change(self._changed)

    def _changed(self, worker: Worker) -> None:
        round_ = self._round
        if round_ is not None:
            round_.cut(worker)

    async def transports(self) -> tuple[str, ...]:
        """Return the transports that all ready servers accept, best first.

        Shared memory is only used for servers that this run launched: a server in a container of its own would crash on
        a message that names memory it cannot see. Raises EngineError; raises ConfigError for an unknown pause mode.
        """
        workers = self._pool.ready
        told = await asyncio.gather(*(server_facts(self._http, worker.url) for worker in workers))
        for worker, facts in zip(workers, told):
            worker.software = facts.software
            if (mode := self._args.update_weight_pause_mode) not in (None, *facts.pause_modes):
                raise ConfigError(
                    f"--update-weight-pause-mode {mode}: {worker.url} runs version {facts.software}, which"
                    f" cannot flush its cache in it; allowed: {', '.join(facts.pause_modes)}"
                )
        if any(facts.is_atomic for facts in told):
            return ("disk",)
        near = ("tensor",) if all(worker.owned for worker in workers) else ()
        far = ("distributed",) if all(facts.pp_size == 1 for facts in told) else ()
        return (*near, *far, "disk")

    # -- transports ------------------------------------------------------------------------------------

    async def from_tensors(self, weights: Iterable[Named], version: int) -> dict[str, float]:
        """Send weights by shared memory to servers on this host. Raises WeightSyncError."""
        return await self._from_buckets("tensor", weights, version, shared=True, send=self.push_shared)

    async def push_shared(self, round_: Round, bucket: Bucket, number: int, *, last: bool) -> None:
        """Make every live server copy a bucket from shared memory. Raises WeightSyncError as `Round.each`."""
        await push_shared(round_, bucket, number, last=last)

    async def from_broadcast(self, weights: Iterable[Named], version: int) -> dict[str, float]:
        """Send weights by broadcast to servers on any host. Raises WeightSyncError."""
        if self._groups is None:
            self._groups = Groups(self._pool)
        send = self._groups.push_bucket
        return await self._from_buckets("distributed", weights, version, shared=self._tolerant, send=send)

    async def from_directory(self, path: Path, version: int) -> dict[str, float]:
        """Load weights from files on a path that the servers share. Raises WeightSyncError."""
        path = Path(path)
        return await self.run(Kept(version, "disk", partial(push_directory, path=path)))

    async def check(self, weights: Iterable[Named]) -> None:
        """Compare the weights of every ready server with the trained weights of the wanted version.

        Raises:
            WeightSyncError: As in `run`; a server with other weights counts as failed.
        """
        async with written(self._args, weights) as path:
            await self.run(Kept(self._pool.version_wanted or 0, CHECK, partial(push_compared, path=path)))

    async def _from_buckets(
        self, transport: str, weights: Iterable[Named], version: int, *, shared: bool, send: Send
    ) -> dict[str, float]:
        buckets: list[Bucket] = []

        async def push(round_: Round) -> None:
            buffers: Buffers | None = None
            try:
                for number, (named, last) in enumerate(group_tensors(weights, self._args.update_weight_buffer_size)):
                    if buffers is None:
                        device = named[0][1].device
                        # With `colocate` the servers see the trainer's GPUs.
                        on_host = shared and (device.type == "cpu" or self._tolerant or not self._args.colocate)
                        buffers = Buffers(shared=on_host, keep=self._tolerant, device=device)
                    # A large copy; in a thread, so that the event loop stays free.
                    bucket = await asyncio.to_thread(buffers.fill, named)
                    if self._tolerant:
                        buckets.append(bucket)
                    await send(round_, bucket, number, last=last)
            finally:
                if buffers is not None:
                    buffers.free()

        async def again(round_: Round) -> None:
            (worker,) = round_.live
            await self._send_kept(round_, worker, buckets)

        kept = Kept(version, transport, again, buckets=buckets)
        try:
            return await self.run(kept, push)
        except BaseException:
            kept.free()
            raise

    # -- the frame -------------------------------------------------------------------------------------

    async def run(self, kept: Kept, push: Push | None = None) -> dict[str, float]:
        """Update every ready server to a version greater than all earlier ones; return metrics of the update.

        Args:
            kept: Weights that update a server to this version, now and later.
            push: Function for this update, if it differs from `kept.push`.

        Raises:
            WeightSyncError: A server failed without `--use-fault-tolerance`, all servers failed and none is being
                restarted, or every server that responds has refused the weights.
        """
        checks = kept.transport == CHECK
        lasts = self._tolerant or (kept.transport in BY_FILES and not checks)
        late = WeightSyncError(f"an engine has been brought back for {self._timeout:g} s; the update cannot begin")
        async with self._pool.updating(self._timeout, late):
            round_ = Round(
                self._http, self._pool, self._pool.ready, version=kept.version, transport=kept.transport, kept=lasts,
                timeout=self._timeout, tolerant=self._tolerant, pause_mode=self._args.update_weight_pause_mode,
            )  # fmt: skip
            self._round = round_
            self._check_anyone(round_, comes_back=lasts)
            self._pool.version_coming = kept.version
            try:
                try:
                    paused = await round_.take(push or kept.push)
                except BaseException as error:
                    round_.drop_all("updating", error)
                    raise
                finally:
                    self._round = None
                    await round_.release()
                self._check_anyone(round_, comes_back=lasts)
                self._pool.version_wanted = kept.version
            finally:
                self._pool.version_coming = None
            if not checks:
                previous, self.last = self.last, kept if lasts else None
                if previous is not None:
                    previous.free()
        return {"perf/update_weights_pause_time": paused}

    async def catch_up(self, worker: Worker) -> None:
        """Update an idle server with the kept weights; sets `worker.weight_version`, but not the state READY.

        The supervisor calls it from a thread of its own while it holds `pool.update_lock`, so it does not use the
        engine's connections.

        Raises:
            WeightSyncError: The server does not respond, refuses, or has other weights afterwards.
        """
        kept = self.last
        assert kept is not None, "the caller has looked"
        worker.weight_version = None
        async with type(self._http)(timeout=self._timeout) as http:
            round_ = Round(
                http, WorkerPool([]), [worker], version=kept.version, transport=kept.transport, timeout=self._timeout,
                tolerant=False, idle=True,
            )  # fmt: skip
            try:
                await round_.take(kept.push)
                if self._args.check_weight_update_equal and kept.buckets:
                    async with written(self._args, chain.from_iterable(b.named() for b in kept.buckets)) as path:
                        await round_.take(partial(push_compared, path=path))
            except BaseException:
                await round_.end_session(worker)
                raise

    def _check_anyone(self, round_: Round, *, comes_back: bool) -> None:
        """Raise WeightSyncError if no server is left and none is being restarted."""
        if not round_.live and not (comes_back and self._pool.recovering):
            known = "; ".join(round_.failed.values()) or self._pool.describe()
            known = known or "none has registered at the router; --rollout-num-gpus N starts some"
            raise WeightSyncError(f"weight version {round_.version}: no engine is left to take it ({known})")

    async def _send_kept(self, round_: Round, worker: Worker, buckets: Sequence[Bucket]) -> None:
        """Send kept buckets by shared memory to a server of this run, by broadcast to an external one.

        Raises WeightSyncError.
        """
        if not worker.owned:
            try:
                return await send_alone(round_, worker, buckets)
            except EngineError as error:
                round_.judge("sending the buckets", {worker: error})
        for number, bucket in enumerate(buckets):
            await self.push_shared(round_, bucket, number, last=bucket is buckets[-1])

    def close(self) -> None:
        """Leave process groups and free the kept weights."""
        if self._groups is not None:
            self._groups.close()
        if self.last is not None:
            self.last.free()
            self.last = None
