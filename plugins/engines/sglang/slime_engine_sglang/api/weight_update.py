"""One weight update of an engine, from asking the servers what they are to letting them generate again.

    lock -> ask each server -> pause -> (open session) -> transport -> (close session) -> version as wanted?
         -> flush the cache -> resume -> pool.version_wanted = N -> unlock

`HttpEngine` calls it; transports are `weight_tensor`, `weight_distributed` and `weight_disk`. Every server that misses
a step is quarantined at once and stays paused, so that a mixture of weights never serves. What a reader would get
wrong: SGLang is paused even when nothing runs, since between two buckets a request could start.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.protocols import Args
from slime_engine_sglang.api import weight_protocol
from slime_engine_sglang.api.last_weights import LastWeights
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.weight_buckets import Bucket, Buffers, group_tensors
from slime_engine_sglang.api.weight_disk import push_directory
from slime_engine_sglang.api.weight_distributed import Groups
from slime_engine_sglang.api.weight_protocol import call, served_version, server_facts
from slime_engine_sglang.api.weight_round import Round
from slime_engine_sglang.api.weight_tensor import push_bucket
from slime_engine_sglang.api.worker import Worker, WorkerPool

WEIGHT_SETTINGS = frozenset(
    {"update_weight_buffer_size", "update_weight_timeout", "update_weight_pause_mode", "colocate"}
)
"""Settings of `WeightUpdates` that an engine without servers does not have."""

Push = Callable[[Round], Awaitable[None]]
_UNLOCK_POLL_S = 0.02
_BY_FILES = ("disk", "delta")
"""Transports that any server takes, without a session."""


class WeightUpdates:
    """The weights of a pool's servers."""

    def __init__(self, http: Http, pool: WorkerPool, args: Args) -> None:
        self._http = http
        self._pool = pool
        self._timeout = float(args.update_weight_timeout)
        self._buffer_size = int(args.update_weight_buffer_size)
        self._pause_mode: str | None = args.update_weight_pause_mode
        self._tolerant = bool(args.use_fault_tolerance)
        self._ipc = bool(args.colocate)
        """The servers see the trainer's GPUs."""
        self._groups: Groups | None = None
        self._round: Round | None = None
        self.last: LastWeights | None = None
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
            if self._pause_mode not in (None, *facts.pause_modes):
                raise ConfigError(
                    f"--update-weight-pause-mode {self._pause_mode}: {worker.url} runs SGLang {facts.software}, which"
                    f" cannot flush its cache in it; allowed: {', '.join(facts.pause_modes)}"
                )
        if not all(facts.is_sglang for facts in told):
            return ("disk",)
        near = ("tensor",) if all(worker.owned for worker in workers) else ()
        far = ("distributed",) if all(facts.pp_size == 1 for facts in told) else ()
        return (*near, *far, "disk")

    # -- transports ------------------------------------------------------------------------------------

    async def from_tensors(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        """By shared memory, to servers on this host. Raises WeightSyncError."""

        async def push(round_: Round, kept: list[Bucket]) -> None:
            await self._send_buckets(round_, weights, kept, shared=True, send=push_bucket)

        return await self._with_buckets("tensor", version, push)

    async def from_broadcast(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        """By broadcast, to servers anywhere. Raises WeightSyncError."""

        async def push(round_: Round, kept: list[Bucket]) -> None:
            if self._groups is None:
                self._groups = Groups(self._pool)
            await self._send_buckets(round_, weights, kept, shared=self._tolerant, send=self._groups.push_bucket)

        return await self._with_buckets("distributed", version, push)

    async def from_directory(self, path: Path, version: int) -> dict[str, float]:
        """From files that the servers see. Raises WeightSyncError."""
        path = Path(path)
        last = LastWeights(version, self._timeout, directory=path)
        return await self.run("disk", version, lambda round_: push_directory(round_, path), session=False, last=last)

    async def _with_buckets(
        self, transport: str, version: int, push: Callable[[Round, list[Bucket]], Awaitable[None]]
    ) -> dict[str, float]:
        kept: list[Bucket] = []
        last = LastWeights(version, self._timeout, buckets=kept)
        try:
            return await self.run(transport, version, lambda round_: push(round_, kept), session=True, last=last)
        except BaseException:
            last.free()
            raise

    async def _send_buckets(
        self,
        round_: Round,
        weights: Iterable[tuple[str, torch.Tensor]],
        kept: list[Bucket],
        *,
        shared: bool,
        send: Callable[..., Awaitable[None]],
    ) -> None:
        buffers: Buffers | None = None
        try:
            for number, (named, last) in enumerate(group_tensors(weights, self._buffer_size)):
                if buffers is None:
                    device = named[0][1].device
                    on_host = shared and (device.type == "cpu" or self._tolerant or not self._ipc)
                    buffers = Buffers(shared=on_host, keep=self._tolerant, device=device)
                # A big copy, during which the loop has others to serve.
                bucket = await asyncio.to_thread(buffers.fill, named)
                if self._tolerant:
                    kept.append(bucket)
                await send(round_, bucket, number, last=last)
        finally:
            if buffers is not None:
                buffers.free()

    # -- the frame -------------------------------------------------------------------------------------

    async def run(
        self, transport: str, version: int, push: Push, *, session: bool, last: LastWeights
    ) -> dict[str, float]:
        """Bring every ready server to `version` by `push`; metrics of the update.

        Args:
            transport: Its name in messages.
            version: Greater than any before.
            push: Has the round's live servers take the weights.
            session: Whether the transport goes by the server's session protocol.
            last: What brings a server to this version later.

        Raises:
            WeightSyncError: A server failed without `--use-fault-tolerance`, or all did and none of them is ours, or
                every server that answers has refused the weights.
        """
        async with self._locked():
            workers = self._pool.ready
            round_ = Round(
                self._http, self._pool, workers,
                version=version, transport=transport, timeout=self._timeout, tolerant=self._tolerant,
                kept=transport in _BY_FILES,
            )  # fmt: skip
            self._round = round_
            self._check_anyone(round_)
            self._pool.version_coming = version
            try:
                paused = await self._attempt(round_, push, session=session)
                self._pool.version_wanted = version
            finally:
                self._pool.version_coming = None
            previous, self.last = self.last, last if self._tolerant or transport in _BY_FILES else None
            if previous is not None:
                previous.free()
        return {"perf/update_weights_pause_time": paused}

    async def _attempt(self, round_: Round, push: Push, *, session: bool) -> float:
        """`_run`, and what is due to the servers that failed. Raises WeightSyncError, and whatever the trainer does."""
        try:
            paused = await self._run(round_, push, session=session)
        except BaseException as error:
            round_.drop_all("updating", error)
            raise
        finally:
            self._round = None
            await asyncio.gather(*(self._go_on(round_, worker) for worker in round_.unharmed))
            await asyncio.gather(*(self._leave(round_, worker) for worker in round_.failed))
        self._check_anyone(round_)
        return paused

    async def _run(self, round_: Round, push: Push, *, session: bool) -> float:
        """Seconds for which the servers generated nothing."""

        async def ask(worker: Worker) -> None:
            round_.facts[worker] = facts = await server_facts(self._http, worker.url)
            worker.software = facts.software
            if not facts.is_sglang and round_.transport not in _BY_FILES:
                raise WeightSyncError(f"{worker.url} is no SGLang server: it takes weights from disk only")

        async def frame(worker: Worker, step: Callable[..., Awaitable[None]]) -> None:
            await step(self._http, worker.url, round_.facts[worker], timeout=self._timeout)

        await round_.each("asking what it is", ask)
        started = time.perf_counter()
        await round_.each("pausing", lambda worker: self._pause(round_, worker))
        if session:
            await round_.each("opening the session", lambda worker: frame(worker, weight_protocol.begin_update))
        await push(round_)
        if session:
            await round_.each("closing the session", lambda worker: frame(worker, weight_protocol.end_update))
        await round_.each("checking the version", lambda worker: self._check_version(round_, worker))
        await round_.each("flushing the cache", lambda worker: self._flush(round_, worker))
        await round_.each("resuming", lambda worker: self._resume(round_, worker))
        return time.perf_counter() - started

    def _check_anyone(self, round_: Round) -> None:
        """Somebody must be left, or be about to come back. Raises WeightSyncError."""
        kept = self._tolerant or round_.transport in _BY_FILES
        if not round_.live and not (kept and self._pool.recovering):
            known = "; ".join(round_.failed.values()) or self._pool.describe()
            raise WeightSyncError(f"weight version {round_.version}: no engine is left to take it ({known})")

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the pool's lock; the supervisor, in a thread of its own, holds it while it brings a server back."""
        lock, deadline = self._pool.update_lock, time.monotonic() + self._timeout
        while not lock.acquire(blocking=False):
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"an engine has been brought back for {self._timeout:g} s; the update cannot begin"
                )
            await asyncio.sleep(_UNLOCK_POLL_S)
        try:
            yield
        finally:
            lock.release()

    # -- steps of one server ---------------------------------------------------------------------------

    def _mode(self, round_: Round, worker: Worker) -> str | None:
        """How it is paused; servers of ours take an update in one piece and need no pause.

        Those that the caller has paused stay as they are, and are his to resume: told to end the requests that it holds
        in place, SGLang 0.5.20 waits for them for ever.
        """
        facts = round_.facts[worker]
        return self._pool.pause_mode or self._pause_mode or (facts.pause_modes[0] if facts.is_sglang else None)

    async def _pause(self, round_: Round, worker: Worker) -> None:
        mode = self._mode(round_, worker)
        if mode is not None and self._pool.pause_mode is None:
            self._pool.interrupt()
            await call(self._http, worker.url, "/pause_generation", {"mode": mode}, timeout=self._timeout)

    async def _resume(self, round_: Round, worker: Worker) -> None:
        if self._mode(round_, worker) is not None and self._pool.pause_mode is None:
            await call(self._http, worker.url, "/continue_generation", {}, timeout=self._timeout)

    async def _check_version(self, round_: Round, worker: Worker) -> None:
        found = await served_version(self._http, worker.url)
        if found != str(round_.version):
            raise EngineError(f"it reports weight version {found!r} after an update to {round_.version}")
        worker.weight_version = round_.version

    async def _flush(self, round_: Round, worker: Worker) -> None:
        """Requests paused in place keep the prefixes of the old weights, as they were promised; others must not.

        So in place the cache may stay, refused for those or for one that was just answered. Requests that begin after
        the update look into another part of it (`Client`).
        """
        must = self._mode(round_, worker) != "in_place"
        await weight_protocol.flush_cache(self._http, worker.url, round_.facts[worker], must=must)

    async def _go_on(self, round_: Round, worker: Worker) -> None:
        """A server that refused before it wrote anything serves what it served; one that does not say so is out."""
        try:
            wanted, served = self._pool.version_wanted, await served_version(self._http, worker.url)
            if served == str(round_.version) or (wanted is not None and served != str(wanted)):
                raise EngineError(f"{worker.url} reports weight version {served!r}, wanted is {wanted}")
            await self._resume(round_, worker)
        except EngineError as error:
            round_.drop(worker, "going on with the old weights", error)

    async def _leave(self, round_: Round, worker: Worker) -> None:
        """A server that failed is not worth waiting for, but if it lives, its session and its requests should end.

        It stays paused: whatever it holds must not serve.
        """
        with contextlib.suppress(EngineError):
            facts = round_.facts.get(worker)
            if facts is not None and round_.transport not in _BY_FILES:
                await weight_protocol.end_update(self._http, worker.url, facts, timeout=5.0)
        self._pool.interrupt()
        with contextlib.suppress(EngineError):
            await call(self._http, worker.url, "/abort_request", {"abort_all": True}, timeout=5.0)

    def close(self) -> None:
        """Leave process groups and free what was kept."""
        if self._groups is not None:
            self._groups.close()
        if self.last is not None:
            self.last.free()
            self.last = None
