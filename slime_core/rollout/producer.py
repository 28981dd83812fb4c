"""Continuous generation (`--async-mode full`): an endless pool from which the rollout stage takes rollouts.

Weights are pushed while groups are in flight::

    in flight   ...==g3=====v1|v2=====g9====...        one response, tokens of two versions
    take(r)         |rollout_batch_size oldest|
    train, push               |---- r ----|push|

So the tokens of a response may have several weight versions. The sample records each version, and every estimator's
corrections (TIS, ...) use the log-probs with which the tokens were sampled. The producer replaces the built-in rollout
function: generate functions, rewards, filters, buffers and hooks work as in a run without `--async`. Another
`--rollout-function-path` decides for itself when its rollout is complete, so it is refused.

A new group may start under three conditions. Fewer than `--async-buffer-groups` groups wait (a whole rollout's groups
during a `take`); fewer than `--sglang-server-concurrency` samples are unfinished; and, with `--max-staleness`, a group
begun now would not be too old when its turn comes. Staleness is judged when a rollout is about to be taken, with the
weight version that will train on it: a waiting group may become too old, never younger.

One task makes all decisions. `take` waits until enough groups wait that the current weights may train on, or until no
more will come. Drawing stops once `--dynamic-sampling-budget` x batch size groups would not have made a rollout since
the last take. If everything in flight then ends without a complete rollout, `--dynamic-sampling-on-exhausted` decides
what to do. The waiting or next `take` raises an error of the task (data source, filter, too many failures in a row).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from slime_core.data.buffer import is_finished
from slime_core.errors import RolloutError, RolloutInterrupted, rollout_name
from slime_core.protocols import Args, DataSource
from slime_core.rollout import staleness
from slime_core.rollout.deadlines import ended, some_done
from slime_core.rollout.fate import Outcome, given_back, restarted
from slime_core.rollout.pool import Finished, Flight, Pool, RolloutContext, first_number
from slime_core.rollout.state import (
    ASIDE,
    IN_FLIGHT,
    WAITING,
    OpenGroup,
    check_group_size,
    finished_to_open,
    flight_to_open,
)
from slime_core.sample import Group, Sample, SampleStatus
from slime_core.waits import waiting

OWNER = "continuous"
"""Owner name of the groups that `GroupProducer` holds (`rollout.state`)."""


class Taken(NamedTuple):
    """The groups of one rollout."""

    groups: list[Group]
    """Groups of the rollout, sorted by `group_index`."""
    decided: list[Group]
    """`groups` and the groups discarded since the rollout before, sorted by `group_index`."""
    metrics: dict[str, float]
    started: float
    """`time.perf_counter()` when the previous rollout was taken; for the first rollout, when generation began."""


class GroupProducer(Pool):
    """A pool that keeps groups in flight in the event loop of the caller of `take`; call all methods in that loop."""

    endless = True

    def __init__(self, args: Args, source: DataSource, context: RolloutContext, version: Callable[[], int]) -> None:
        """Create the producer; `version` returns the newest weight version, which trains on groups taken now."""
        super().__init__(args, source, context, version=version)
        self.taking = self.halted = False
        self._news = asyncio.Event()
        """Set when groups have been decided, or no more will be decided."""
        self._aborts_in_a_row = self.num_recycled = self.num_stale = 0
        self.gone: list[Group] = []
        """Groups discarded since the last take; kept only for the hook `slime_process_all_samples`."""
        self.taken_by: tuple[int, int] = (0, 0)
        """A weight version, and the number of groups taken for training by it."""
        self._oldest: int | None = None
        """Lower bound of the weight versions of waiting tokens."""
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._sees_requests = False
        self._started_at = self._since = 0.0

    # -- room ----------------------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """True if too many groups were discarded, or aborted in a row, to draw more for this rollout."""
        args = self.args
        patience = args.dynamic_sampling_budget * args.rollout_batch_size + 2 * args.sglang_server_concurrency
        return self.num_gone + args.rollout_batch_size > self.budget or self._aborts_in_a_row > patience

    def room(self) -> int:
        """Number of groups that may be started now."""
        args = self.args
        held, wanted = self.held, self.wanted if self.taking else 0
        most_waiting = max(args.async_buffer_groups or args.rollout_batch_size, wanted)
        if self.halted or self.exhausted or len(self.waiting) >= most_waiting:
            return 0
        free = args.sglang_server_concurrency - self.places
        room = math.ceil(free / (args.n_samples_per_prompt + self.context.runner.greedy_baseline))
        if args.num_rollout is not None:
            room = min(room, (args.num_rollout - self.rollout_id) * args.rollout_batch_size - held)
        if args.max_staleness is not None:
            # A group begun now follows `taken + held` others that the current weights and their successors train on.
            version, taken = self.taken_by
            taken = taken if version == self.version() else 0
            per_version = args.update_weights_interval * args.rollout_batch_size
            room = min(room, max((args.max_staleness + 1) * per_version - taken - held, wanted - held))
        return int(max(room, 0))

    def _watchers(self, flight: Flight) -> dict[str, object]:
        size = flight.unfinished

        def resize(unfinished: int) -> None:
            before, flight.unfinished = flight.places, unfinished
            if flight.number in self.flights:
                self.places += flight.places - before

        def sample_done(siblings: list[Sample]) -> None:
            if any(s.status == SampleStatus.ABORTED for s in siblings):
                return  # the group comes back and needs its place again, so no other group gets it
            resize(flight.unfinished - 1)
            self.bell.set()

        again = {} if self.args.group_timeout is None else {"again": partial(resize, size)}
        return {"sample_done": sample_done, **again}

    # -- deciding ------------------------------------------------------------------------------------

    def decide(self, group: Finished) -> Outcome | None:
        """Decide the group as every pool does, and record kept groups as waiting in the ledger."""
        outcome = super().decide(group)
        self._aborts_in_a_row = self._aborts_in_a_row + 1 if outcome is Outcome.AGAIN else 0
        if outcome is Outcome.KEPT:
            self.context.ledger.buffered([group.samples])
        return outcome

    def keep(self, group: Finished) -> None:
        """Keep the group waiting for the next rollout."""
        super().keep(group)
        if group.span is not None:
            self._oldest = group.span[0] if self._oldest is None else min(self._oldest, group.span[0])

    def lose(self, group: Finished) -> None:
        """Count the group as discarded."""
        self.num_gone += 1
        self._waste(group)

    def _waste(self, group: Finished) -> None:
        super()._waste(group)
        if self.context.runner.hooks.wants_all_groups:
            self.gone.append(group.samples)

    def _shrink(self, usable: int) -> None:
        self.wanted = usable

    def cull(self) -> None:
        """Recycle or drop waiting groups that are too old for the newest weights to train on."""
        limit = self.args.max_staleness
        if limit is None or self._oldest is None or self.version() - self._oldest <= limit:
            return
        waiting, self.waiting, self._oldest = self.waiting, [], None
        for group in waiting:
            verdict = self.verdict(group)
            if verdict.trains:
                self.keep(group)
                continue
            self.num_gone += 1
            if verdict is staleness.Verdict.RECYCLE:
                self.num_recycled += 1
                self.wasted_tokens += staleness.num_sampled(group.samples)
                again = staleness.recycle(group.original)
                self.context.ledger.recycled(again, "stale")
                self.source.add_samples([again])
                continue
            self.num_stale += 1
            self.context.filters.count("stale")
            self.context.ledger.dropped(group.samples, "stale")
            self._waste(group)

    # -- the task ------------------------------------------------------------------------------------

    def start(self, rollout_id: int) -> None:
        """Begin to generate for a rollout and later rollouts; do nothing if generation has begun."""
        if self._task is not None or self.halted:
            return
        self._begin(rollout_id)
        first = first_number(rollout_id)
        held = [g[0].group_index or 0 for g in [*self.again, *(f.samples for f in self.waiting)]]
        self.numbered = max((index - first + 1 for index in held if index >= first), default=0)
        self._started_at, self._since = asyncio.get_running_loop().time(), time.perf_counter()
        self.context.runner.engine.take_busy_seconds()
        self._task = asyncio.create_task(self._produce(), name="slime-producer")

    def _begin(self, rollout_id: int) -> None:
        self.begin(rollout_id)
        self.num_recycled = self.num_stale = 0
        begin = getattr(self.source, "begin_rollout", None)
        if begin is not None:
            begin(rollout_id, self.version())

    def wake(self) -> None:
        """Check for room again after a change such as new weights or a new `take`."""
        self.bell.set()

    async def _produce(self) -> None:
        try:
            self.bell.clear()
            while True:
                if (room := self.room()) > 0:
                    self.draw(room)
                    while self.ready:
                        self.decide(self.ready.popleft())
                    self.bell.set()  # groups that were drawn already finished may leave room for more
                self._news.set()
                if self.flights:
                    await some_done(self.bell, self.context.runner, f"{len(self.flights)} groups in flight")
                else:
                    with waiting("room for groups", deadline=None, then="they are drawn when the trainer takes some"):
                        await self.bell.wait()
                await self._decide_ended()
                self._held.close()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
            self._news.set()

    # -- taking --------------------------------------------------------------------------------------

    async def take(self, rollout_id: int) -> Taken:
        """Wait for the groups of a rollout; generation continues. Call one `take` at a time, in order of the rollouts.

        Raises:
            RolloutError: No rollout can be completed any more, or the task raised an error.
            RolloutInterrupted: `context.work.interrupt` was called. Generation has ended, all groups in flight are
                given back, and finished groups wait.
        """
        assert not self.taking, "one rollout is taken at a time"
        if self.context.work.interrupted:
            await self.halt(None if self.args.partial_rollout else 0.0)
            raise RolloutInterrupted
        self.start(rollout_id)
        assert rollout_id == self.rollout_id, f"{rollout_name(self.rollout_id)} is next"
        self.taking = True
        try:
            complete = await self.context.until_interrupted(self._completed())
        finally:
            self.taking = False
        if not complete:
            await self.halt(None if self.args.partial_rollout else 0.0)
            raise RolloutInterrupted
        return self._hand_over()

    async def _completed(self) -> None:
        """Return when enough groups wait that the current weights may train on."""
        with waiting(f"the groups of {rollout_name(self.rollout_id)}", deadline=None, then="every group has its own"):
            self.wake()  # there is room for a whole rollout now
            while True:
                if self._failure is not None:
                    raise self._failure
                held = self.held
                if self._complete():
                    return
                if self.held != held:  # some were too old: there is room again (a needless wake would return as news)
                    self.wake()
                self._news.clear()
                await self._news.wait()

    def _complete(self) -> bool:
        """Return whether a rollout can be taken. Raises RolloutError if no rollout can be completed."""
        self.cull()
        if len(self.waiting) >= self.wanted:
            return True
        if self.flights or not self.exhausted:
            return False
        self.settle()
        return True

    def _hand_over(self) -> Taken:
        """Return the oldest waiting groups as the rollout for the newest weights, and begin the next rollout."""
        args, version, engine = self.args, self.version(), self.context.runner.engine
        now, busy = asyncio.get_running_loop().time(), engine.take_busy_seconds()
        elapsed, self._started_at = now - self._started_at, now
        self._sees_requests |= busy > 0  # requests that generate functions post to the engine do not count
        self.waiting.sort(key=lambda f: f.turn)
        chosen, self.waiting = self.waiting[: self.wanted], self.waiting[self.wanted :]
        chosen.sort(key=lambda f: f.index)
        masked = 0
        if args.max_staleness is not None and args.staleness_policy == "mask":
            masked = sum(staleness.mask_old_tokens(f.samples, version, args.max_staleness, f.began) for f in chosen)
        self.forget(0)
        taken_by, taken = self.taken_by
        self.taken_by = version, len(chosen) + (taken if taken_by == version else 0)
        metrics = {
            **self.context.filters.take_metrics(),
            **staleness.staleness_metrics([(f.samples, f.began) for f in chosen], version),
            "rollout/staleness/recycled_groups": float(self.num_recycled),
            "rollout/staleness/dropped_groups": float(self.num_stale),
            "rollout/staleness/masked_tokens": float(masked),
            "rollout/wasted_tokens": float(self.wasted_tokens),
            "rollout/queue/waiting_groups": float(len(self.waiting)),
            "rollout/groups_drawn": float(self.num_drawn),
            "rollout/queue/in_flight_groups": float(len(self.flights)),
        }
        if elapsed > 0 and self._sees_requests:
            metrics["perf/engine_idle_fraction"] = max(0.0, 1.0 - busy / elapsed)
        groups, gone, self.gone = [f.samples for f in chosen], self.gone, []
        self._begin(self.rollout_id + 1)
        self.wake()
        started, self._since = self._since, time.perf_counter()
        return Taken(groups, sorted([*groups, *gone], key=lambda g: g[0].group_index or 0), metrics, started)

    # -- ending, and commits -------------------------------------------------------------------------

    async def halt(self, patience: float | None = None) -> None:
        """End generation permanently: abort and give back the groups in flight; keep those that are finished.

        Args:
            patience: Seconds that aborted samples get to return with their tokens; `--rollout-stop-timeout` if None.
        """
        if self.halted:
            return
        for flight in await self._land(patience):
            finished, drawn = flight.result(), flight.original
            if finished is None:
                self.again.append(restarted(drawn))
            elif is_finished(finished.samples):
                self.decide(finished)
            else:
                self.again.append(given_back(self.args, drawn, finished.samples))
        self.give_back(list(self.again))
        self.again.clear()

    async def stop(self) -> None:
        """End at once; no more rollouts can be taken. Safe to call twice."""
        self._failure = self._failure or RolloutError("generation has been stopped")
        if not self.halted:
            await self._land(0.0)
        self._news.set()

    async def _land(self, patience: float | None) -> list[Flight]:
        self.halted = True
        if self._task is not None:
            await ended({self._task})
        return await self.land(patience)

    def open_groups(self) -> list[OpenGroup]:
        """Return every group that the producer holds, for a commit."""
        partial, scores_groups = self.args.partial_rollout, self.context.runner.rewards.scores_groups
        waiting = sorted(self.waiting, key=lambda f: f.turn)
        return [
            *(finished_to_open(f, WAITING) for f in waiting),
            *(finished_to_open(f, ASIDE) for _, f in self.aside),
            *(OpenGroup(group, details={"state": IN_FLIGHT, "began": self.version()}) for group in self.again),
            *(flight_to_open(f, partial=partial, scores_groups=scores_groups) for f in self.flights.values()),
        ]

    def restore_open_groups(self, groups: list[OpenGroup]) -> None:
        """Restore `open_groups` before `start`. Raises CheckpointError for unfinished groups of another size."""
        assert self._task is None, "generation has begun"
        for group in groups:
            state = group.details["state"]
            if state == IN_FLIGHT:
                self.again.append(check_group_size(group, self.args.n_samples_per_prompt))
            elif state == WAITING:
                self.keep(_finished_again(group))
            else:
                self.put_aside(_finished_again(group))


def _finished_again(group: OpenGroup) -> Finished:
    """Return the finished group of an open group; inverse of `finished_to_open`."""
    prompts = group.details.get("prompts")
    original = [Sample.from_dict(s) for s in prompts] if prompts else group.samples
    spread = float(group.details.get("spread") or 0.0)  # JSON has null for a filter's NaN or infinity
    return Finished(group.samples, original, int(group.details["began"]), spread=spread)
