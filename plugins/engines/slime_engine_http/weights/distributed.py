"""Buckets of weights -> servers anywhere, by broadcast: `/update_weights_from_distributed`.

A torch process group connects this process (rank 0) with the server processes. It is separate from
torch.distributed's own groups, which the trainer may be using. With gloo each server has its own group, so a server
that dies or hangs does not block the others; gloo sends over sockets in both cases. With nccl one group holds all
servers, because of its ring; if a member fails, the bucket is sent to the others again in a new group.

    group of rank 0 and a server:  POST /init_weights_update_group  ||  this process joins, in a thread
    each bucket, each group:       POST /update_weights_from_distributed to every member  ||  broadcast, in a thread

Neither side can be interrupted inside a broadcast, so both wait in threads or processes, under deadlines.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from slime_core.errors import EngineError, WeightSyncError
from slime_engine_http.api.transport import address_towards
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.weights.buckets import Bucket
from slime_engine_http.weights.round import Round

logger = logging.getLogger(__name__)
T = TypeVar("T")
Outcome = dict[Worker, BaseException | None]
"""Error of each member of a group; None: the member succeeded."""
SETTLE_S = 20.0
"""Seconds for the other members of a group to respond after one member failed."""


class Groups:
    """Process groups of this process and a pool's servers; made when needed, made again when servers change."""

    def __init__(self, pool: WorkerPool, *, one_for_all: bool | None = None) -> None:
        """`one_for_all`: use one group for all servers; by default with nccl only."""
        self._one_for_all = one_for_all
        self._groups: list[Group] = []
        self._gone: set[Worker] = set()
        pool.on_change(self._changed)

    def _changed(self, worker: Worker) -> None:
        """Drop the groups of a server that was unreachable: if it was restarted, it knows no group."""
        if worker.state is not WorkerState.READY:
            self._gone.add(worker)

    async def push_bucket(self, round_: Round, bucket: Bucket, number: int, *, last: bool) -> None:
        """Make every live server copy the bucket. Raises WeightSyncError like `Round.each`."""
        todo = list(round_.live)
        while todo:
            groups = await self._groups_for(round_, todo, bucket.flat.device)
            outcomes = await asyncio.gather(*(group.send(round_, bucket, number, last=last) for group in groups))
            for group, outcome in zip(groups, outcomes):
                if any(outcome.values()):
                    await self._discard(round_, group)
            failed = _judge(round_, f"sending bucket {number}", outcomes)
            todo = [worker for worker in failed if worker in round_.live]

    async def _groups_for(self, round_: Round, workers: list[Worker], device: torch.device) -> list[Group]:
        """Return groups whose members are exactly these workers; workers that cannot join drop out of the round."""
        on_gpus = device.type == "cuda" and all(round_.facts[w].device.startswith("cuda") for w in workers)
        backend = "nccl" if on_gpus else "gloo"
        together = backend == "nccl" if self._one_for_all is None else self._one_for_all
        gone, self._gone = self._gone, set()
        while True:
            live = [worker for worker in workers if worker in round_.live]
            wanted = ([live] if live else []) if together else [[worker] for worker in live]
            for group in list(self._groups):
                if not group.fits(round_, backend, gone) or (together and group.workers not in wanted):
                    await self._discard(round_, group)
            there = [group.workers for group in self._groups]
            made = [Group(members, backend) for members in wanted if members not in there]
            outcomes = await asyncio.gather(*(group.join(round_) for group in made))
            for group, outcome in zip(made, outcomes):
                if any(outcome.values()):
                    await self._discard(round_, group)
                else:
                    self._groups.append(group)
            if not _judge(round_, "joining the process group", outcomes):
                return [g for g in self._groups if g.workers in wanted]
            gone = set()

    async def _discard(self, round_: Round, group: Group) -> None:
        if group in self._groups:
            self._groups.remove(group)
        group.abandon()
        # Ignore failures: a server may not know the group any more, or may not respond.
        calls = (
            round_.call(w, "/destroy_weights_update_group", {"group_name": group.name}, timeout=5.0)
            for w in group.workers
            if w in round_.live
        )
        await asyncio.gather(*calls, return_exceptions=True)

    def close(self) -> None:
        """Leave all groups. Servers notice it when the next group is made, or when they end."""
        for group in self._groups:
            group.abandon()
        self._groups = []


class Group:
    """A process group of this process (rank 0) and the processes of some servers."""

    _numbers = itertools.count()

    def __init__(self, workers: list[Worker], backend: str) -> None:
        self.workers = workers
        self.backend = backend
        # Not named by process id: in containers an earlier run, whose groups a server still has, may have the same id.
        self.name = f"slime-{secrets.token_hex(4)}-{next(self._numbers)}"
        self._store: TCPStore | None = None
        self._group: Any = None

    def fits(self, round_: Round, backend: str, gone: set[Worker]) -> bool:
        """Return whether the group can still be used: same backend, no member dropped or restarted."""
        return backend == self.backend and all(w in round_.live and w not in gone for w in self.workers)

    async def join(self, round_: Round) -> Outcome:
        """Connect the members. Return the outcome of each."""
        ranks = [round_.facts[worker].tp_size for worker in self.workers]
        world, limit = 1 + sum(ranks), timedelta(seconds=round_.timeout)
        for worker in self.workers:
            if round_.facts[worker].pp_size > 1:
                raise WeightSyncError(
                    f"{worker.url} is pipeline-parallel, which SGLang's broadcast updates do not know:"
                    " choose --update-weight-transport tensor or disk"
                )
        url = self.workers[0].url
        try:
            host = address_towards(urlsplit(url).hostname)
        except OSError as error:
            raise WeightSyncError(f"{url}: no way to reach it from here: {error}") from error
        self._store = store = TCPStore(host, 0, world, True, timeout=limit, wait_for_workers=False)
        offsets = itertools.accumulate(ranks[:-1], initial=1)

        def enter(worker: Worker, offset: int) -> Any:
            body = {
                "master_address": host, "master_port": store.port, "rank_offset": offset, "world_size": world,
                "group_name": self.name, "backend": self.backend,
            }  # fmt: skip
            return round_.call(worker, "/init_weights_update_group", body)

        calls = {worker: enter(worker, offset) for worker, offset in zip(self.workers, offsets)}
        return await self._together(round_, calls, lambda: self._make(store, world, limit))

    def _make(self, store: TCPStore, world: int, limit: timedelta) -> None:
        """Make this process's end, under the store names that torch's own helpers on the servers use."""
        device = "cuda" if self.backend == "nccl" else "cpu"
        prefix = PrefixStore(f"{device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, store)))
        if self.backend == "gloo":
            self._group = dist.ProcessGroupGloo(prefix, 0, world, limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(prefix, 0, world, options)

    async def send(self, round_: Round, bucket: Bucket, number: int, *, last: bool) -> Outcome:
        """Broadcast bucket number `number`. Return the outcome of each member."""
        body = {
            "names": [s.name for s in bucket.slices],
            "dtypes": [str(s.dtype).removeprefix("torch.") for s in bucket.slices],
            "shapes": [list(s.shape) for s in bucket.slices],
            "group_name": self.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(round_.version) if last else None,
        }
        calls = {worker: round_.call(worker, "/update_weights_from_distributed", body) for worker in self.workers}
        flat, group, limit = bucket.flat[: bucket.nbytes], self._group, round_.timeout

        def broadcast() -> None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            group.broadcast([flat], options).wait(timedelta(seconds=limit))

        results = await self._together(round_, calls, broadcast)
        for worker, error in results.items():
            if isinstance(error, EngineError) and error.status == 400:
                results[worker] = round_.refusal(worker, error, first=number == 0)
        return results

    async def _together(self, round_: Round, calls: dict[Worker, Any], ours: Callable[[], None]) -> Outcome:
        """Run the servers' part over HTTP and this process's part in a thread, concurrently.

        Once one part fails, the others either finish soon or never.
        """
        theirs = {round_.start(worker, answer): worker for worker, answer in calls.items()}
        mine = asyncio.create_task(_in_thread(f"slime-{self.name}", ours))
        everyone = {*theirs, mine}
        try:
            await asyncio.wait(everyone, return_when=asyncio.FIRST_EXCEPTION)
            if not all(task.done() for task in everyone):
                await asyncio.wait(theirs, timeout=SETTLE_S)
                self.abandon()
        finally:
            pending = [task for task in everyone if not task.done()]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        problem = mine.exception() if mine.done() and not mine.cancelled() else None
        results: Outcome = {}
        for task, worker in theirs.items():
            if task.cancelled():
                results[worker] = _Undecided("no answer after the broadcast failed")
            else:
                # The server's own error says more; but a failed broadcast has not reached all members.
                results[worker] = task.exception() or (problem and EngineError(f"broadcast failed: {problem}"))
        return results

    def abandon(self) -> None:
        """Give the group up, even in a broadcast: gloo cannot be aborted, so the thread ends by error or deadline."""
        group, self._group, self._store = self._group, None, None
        if group is not None and self.backend == "nccl":
            threading.Thread(target=group.abort, name=f"slime-abort-{self.name}", daemon=True).start()


async def send_alone(round_: Round, worker: Worker, buckets: Sequence[Bucket]) -> None:
    """Broadcast buckets to one server, in a temporary group. Raises EngineError."""
    group = Group([worker], "gloo")
    try:
        error = (await group.join(round_))[worker]
        for number, bucket in enumerate(buckets):
            if error is None:
                error = (await group.send(round_, bucket, number, last=bucket is buckets[-1]))[worker]
        if error is not None:
            raise error
    finally:
        group.abandon()


class _Undecided(EngineError):
    """A server was still waiting when its group was given up."""


def _judge(round_: Round, phase: str, outcomes: Sequence[Outcome]) -> list[Worker]:
    """Return the failed workers, after passing the culprits among them to `Round.judge`.

    A server that refused may only report a peer's failure; a server that cannot be reached has failed itself.

    Raises:
        WeightSyncError: Raised by `Round.judge`.
    """
    failed = {worker: error for outcome in outcomes for worker, error in outcome.items() if error is not None}
    culprits = {
        worker: error
        for worker, error in failed.items()
        if isinstance(error, EngineError) and error.status is None and not isinstance(error, _Undecided)
    }
    round_.judge(phase, dict(culprits or failed))
    return list(failed)


async def _in_thread(name: str, function: Callable[[], T]) -> T:
    """Run the function in a daemon thread and return its result; the thread does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(), None)
        except Exception as error:
            outcome = (None, error.with_traceback(None))  # its frames would keep the bucket's memory
        if future.done():
            logger.info("%s, which nobody waited for any more, has ended: %s", name, outcome[1] or "well")
        elif not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
