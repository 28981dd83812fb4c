"""The weight updates of an engine: lock -> a `Round` of all ready servers -> pool.version_wanted = N -> unlock.

`HttpEngine` calls it; how the weights travel is said by `transports`, `distributed` and `delta`. A server that is
brought back later is a round of its own, with what was kept (`Kept`).
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
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.worker import Worker, WorkerPool
from slime_engine_sglang.weights.buckets import Bucket, Buffers, Named, group_tensors
from slime_engine_sglang.weights.check import push_compared, written
from slime_engine_sglang.weights.distributed import Groups, send_alone
from slime_engine_sglang.weights.protocol import server_facts
from slime_engine_sglang.weights.round import BY_FILES, CHECK, Round
from slime_engine_sglang.weights.transports import push_directory, push_shared

WEIGHT_SETTINGS = frozenset(
    {"update_weight_buffer_size", "update_weight_timeout", "update_weight_pause_mode", "colocate"}
)
"""Settings of `WeightUpdates` that an engine without servers does not have."""

Push = Callable[[Round], Awaitable[None]]
"""Has the live servers of a round take the weights. Raises WeightSyncError as `Round.each`."""
Send = Callable[..., Awaitable[None]]
"""Has them take one bucket: `send(round, bucket, number, last=...)`."""


@dataclass
class Kept:
    """The weights of a version, at hand for a server that has to be brought up to date later.

    In files that stay until the next version is served; under `--use-fault-tolerance` also in host memory, at the price
    of one copy of them.
    """

    version: int
    transport: str
    push: Push
    """Once more."""
    buckets: Sequence[Bucket] = ()
    """May still be filled until the update is over."""

    def free(self) -> None:
        """Give the memory back; the next version is served. Safe to call twice."""
        buckets, self.buckets = self.buckets, ()
        for bucket in buckets:
            bucket.free()


class WeightUpdates:
    """The weights of a pool's servers."""

    def __init__(self, http: Http, pool: WorkerPool, args: Args) -> None:
        self._http = http
        self._pool = pool
        self._args = args
        self._timeout = float(args.update_weight_timeout)
        self._tolerant = bool(args.use_fault_tolerance)
        self._groups: Groups | None = None
        self._round: Round | None = None
        self.last: Kept | None = None
        """The weights of `pool.version_wanted`, where they are at hand: under fault tolerance, or in files."""
        pool.on_change(self._changed)

    def _changed(self, worker: Worker) -> None:
        round_ = self._round
        if round_ is not None:
            round_.cut(worker)

    async def transports(self) -> tuple[str, ...]:
        """What all ready servers take, best first. Raises EngineError, ConfigError for a pause they do not know.

        Shared memory only for servers that we launched: one in a container of its own would end on a message that
        names memory it does not see.
        """
        workers = self._pool.ready
        told = await asyncio.gather(*(server_facts(self._http, worker.url) for worker in workers))
        for worker, facts in zip(workers, told):
            worker.software = facts.software
            if (mode := self._args.update_weight_pause_mode) not in (None, *facts.pause_modes):
                raise ConfigError(
                    f"--update-weight-pause-mode {mode}: {worker.url} runs SGLang {facts.software}, which"
                    f" cannot flush its cache in it; allowed: {', '.join(facts.pause_modes)}"
                )
        if not all(facts.is_sglang for facts in told):
            return ("disk",)
        near = ("tensor",) if all(worker.owned for worker in workers) else ()
        far = ("distributed",) if all(facts.pp_size == 1 for facts in told) else ()
        return (*near, *far, "disk")

    # -- transports ------------------------------------------------------------------------------------

    async def from_tensors(self, weights: Iterable[Named], version: int) -> dict[str, float]:
        """By shared memory, to servers on this host. Raises WeightSyncError."""
        return await self._from_buckets("tensor", weights, version, shared=True, send=push_shared)

    async def from_broadcast(self, weights: Iterable[Named], version: int) -> dict[str, float]:
        """By broadcast, to servers anywhere. Raises WeightSyncError."""
        if self._groups is None:
            self._groups = Groups(self._pool)
        send = self._groups.push_bucket
        return await self._from_buckets("distributed", weights, version, shared=self._tolerant, send=send)

    async def from_directory(self, path: Path, version: int) -> dict[str, float]:
        """From files that the servers see. Raises WeightSyncError."""
        path = Path(path)
        return await self.run(Kept(version, "disk", partial(push_directory, path=path)))

    async def check(self, weights: Iterable[Named]) -> None:
        """Compare every ready server with the weights trained, of which it has the version wanted.

        Raises:
            WeightSyncError: As `run`; a server that serves something else has failed.
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
                    # A big copy, during which the loop has others to serve.
                    bucket = await asyncio.to_thread(buffers.fill, named)
                    if self._tolerant:
                        buckets.append(bucket)
                    await send(round_, bucket, number, last=last)
            finally:
                if buffers is not None:
                    buffers.free()

        async def again(round_: Round) -> None:
            (worker,) = round_.live
            await _send_kept(round_, worker, buckets)

        kept = Kept(version, transport, again, buckets=buckets)
        try:
            return await self.run(kept, push)
        except BaseException:
            kept.free()
            raise

    # -- the frame -------------------------------------------------------------------------------------

    async def run(self, kept: Kept, push: Push | None = None) -> dict[str, float]:
        """Bring every ready server to a version, which is greater than any before; metrics of the update.

        Args:
            kept: What brings a server to this version, now and later.
            push: What does now, where that is another way.

        Raises:
            WeightSyncError: A server failed without `--use-fault-tolerance`, or all did and none of them comes back, or
                every server that answers has refused the weights.
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
        """Have a server that generates nothing take the weights kept; sets `worker.weight_version`, not READY.

        The supervisor calls it from a thread of its own, holding `pool.update_lock`; so it does not use the engine's
        connections.

        Raises:
            WeightSyncError: It does not answer, refuses, or serves something else afterwards.
        """
        kept = self.last
        assert kept is not None, "the caller has looked"
        worker.weight_version = None
        async with Http(timeout=self._timeout) as http:
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
        """Somebody must be left, or be about to come back. Raises WeightSyncError."""
        if not round_.live and not (comes_back and self._pool.recovering):
            known = "; ".join(round_.failed.values()) or self._pool.describe()
            known = known or "none has registered at the router; --rollout-num-gpus N starts some"
            raise WeightSyncError(f"weight version {round_.version}: no engine is left to take it ({known})")

    def close(self) -> None:
        """Leave process groups and free what was kept."""
        if self._groups is not None:
            self._groups.close()
        if self.last is not None:
            self.last.free()
            self.last = None


async def _send_kept(round_: Round, worker: Worker, buckets: Sequence[Bucket]) -> None:
    """Through shared memory to a server that we launched, by broadcast to another. Raises WeightSyncError."""
    if not worker.owned:
        try:
            return await send_alone(round_, worker, buckets)
        except EngineError as error:
            round_.judge("sending the buckets", {worker: error})
    for number, bucket in enumerate(buckets):
        await push_shared(round_, bucket, number, last=bucket is buckets[-1])
