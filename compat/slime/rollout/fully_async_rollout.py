"""`slime.rollout.fully_async_rollout.generate_rollout_fully_async`: generation continues while the trainer trains.

A rollout takes the groups that finished first; groups in flight continue after its end and during weight updates::

    draw --> in flight (--sglang-server-concurrency) --> finished, in order --> the next rollout takes its batch
      ^--------- given back: aborted ---'                 `- full: nothing is drawn until some are taken
      `- while a rollout is asked for, and at its end: between rollouts the data source is being saved by another thread

`--async --async-mode full` does the same within slime_core. There, groups generated ahead are part of the checkpoint,
and groups that are too old are dropped (`--max-staleness`); here, a resumed run has lost the groups in flight. There is
one worker per process, on the loop of `slime.utils.async_utils`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from slime import _missing
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from slime.rollout.sglang_rollout import GenerateState, eval_rollout, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import load_function
from slime_core.sample import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, SampleStatus

logger = logging.getLogger(__name__)


class AsyncRolloutWorker:
    """A worker that draws and generates groups, as many at once as fit. It belongs to one event loop."""

    def __init__(self, args: Any, data_buffer: Any, concurrency: int = 10) -> None:
        """Set the limit to `concurrency` samples at once, but at least one group."""
        self.args = args
        self.data_buffer = data_buffer
        self.concurrency = max(1, concurrency // args.n_samples_per_prompt)
        """Limit of groups in flight, and of finished groups that wait."""
        self.running = True
        self._flights: set[asyncio.Task[Group]] = set()
        self._finished: deque[Group] = deque()
        self._aborted: list[Group] = []
        self._problem: BaseException | None = None
        self._news = asyncio.Event()

    def start(self) -> None:
        """Give back aborted groups, and draw as many groups as fit. Call this during a rollout only."""
        if self._aborted:
            self.data_buffer.add_samples(self._aborted)
            self._aborted = []
        while self.running and max(len(self._flights), len(self._finished)) < self.concurrency:
            groups = self.data_buffer.get_samples(1)
            if not groups:
                return
            for group in groups:
                params = GenerateState(self.args).sampling_params.copy()
                flight = asyncio.ensure_future(
                    generate_and_rm_group(self.args, group, sampling_params=params, evaluation=False)
                )
                self._flights.add(flight)
                flight.add_done_callback(self._landed)

    def stop(self) -> None:
        """Stop drawing groups, and cancel the groups in flight."""
        self.running = False
        for flight in self._flights:
            flight.cancel()

    def queue_size(self) -> int:
        """Return the number of finished groups that wait."""
        return len(self._finished)

    def get_completed_groups(self, limit: int | None = None) -> list[Group]:
        """Remove and return the groups that finished first, at most `limit`."""
        number = len(self._finished) if limit is None else min(limit, len(self._finished))
        return [self._finished.popleft() for _ in range(number)]

    async def take(self, limit: int) -> list[Group]:
        """Wait for a finished group, and return at most `limit` finished groups.

        Raises:
            Exception: The error that ended generation, which is not retried.
            RuntimeError: The data source has no more groups.
        """
        while True:
            self.start()
            if self._problem is not None:
                raise self._problem
            if self._finished:
                return self.get_completed_groups(limit)
            if not self._flights:
                raise RuntimeError("fully async rollout: the data source gives no groups, and none is in flight")
            self._news.clear()
            await self._news.wait()

    def _landed(self, flight: asyncio.Task[Group]) -> None:
        self._flights.discard(flight)
        self._news.set()
        if flight.cancelled():
            return
        problem = flight.exception()
        if problem is not None:
            self._problem = problem
            return
        group = flight.result()
        if any(sample.status == SampleStatus.ABORTED for sample in group):
            self._aborted.append(group)
        else:
            self._finished.append(group)


_worker: AsyncRolloutWorker | None = None


async def _rollout(args: Any, rollout_id: int, data_buffer: Any) -> RolloutFnTrainOutput:
    global _worker
    if _worker is None or _worker.data_buffer is not data_buffer or not _worker.running:
        logger.warning(
            "fully async rollout: a resumed run has lost what was in flight, up to a rollout's prompts; --async"
            " --async-mode full without --rollout-function-path keeps it in every commit"
        )
        _worker = AsyncRolloutWorker(args, data_buffer, args.sglang_server_concurrency * get_rollout_num_engines(args))
    GenerateState(args).rollout_id = rollout_id
    path = getattr(args, "dynamic_sampling_filter_path", None)
    function = load_function(path) if path else None
    taken: list[Group] = []
    drops = MetricGatherer()
    while len(taken) < args.rollout_batch_size:
        for group in await _worker.take(args.rollout_batch_size - len(taken)):
            answer = call_dynamic_filter(function, args, group)
            if answer.keep:
                taken.append(group)
            else:
                drops.on_dynamic_filter_drop(answer.reason)
    _worker.start()
    logger.info("fully async rollout %d: %d finished groups wait", rollout_id, _worker.queue_size())
    taken.sort(key=lambda group: group[0].index or 0)
    return RolloutFnTrainOutput(samples=taken, metrics=drops.collect())


def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run a rollout; an evaluation runs as in `slime.rollout.sglang_rollout`, while groups are in flight.

    Raises:
        slime_core.errors.RolloutError: `--max-consecutive-failures` samples in a row failed.
    """
    if evaluation:
        output, _ = run(eval_rollout(args, rollout_id))
        return output
    return run(_rollout(args, rollout_id, data_buffer))


__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async"]
__getattr__ = _missing.names(__name__)
