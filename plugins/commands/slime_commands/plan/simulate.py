"""Simulate a run with discrete events: `Workload` and `Plan` -> `Prediction`; a few seconds for days of training.

    sync       | generate r | train r | push |
    one-step   | generate r+1 during train r | push when both are done |
    full       generation never stops but for pushes; training takes groups as they are finished

The simulation follows the rules of `loop.py` and the rollout functions without their work. Called by `slime plan
--trace` and by `benchmarks/async_overlap.py`. Trainer and engines are separate machines here, as in a disaggregated
run; if both share the same processor cores, asynchronous training gains less.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from slime_commands.plan.engines import Engines, Request
from slime_commands.plan.workload import GroupWork, Workload
from slime_core.errors import ConfigError

Mode = Literal["sync", "one-step", "full"]
Wait = float | Callable[[], bool]
"""Seconds to sleep, or a condition to wait for."""
_MOST_EVENTS = 20_000_000


@dataclass(frozen=True)
class Plan:
    """The simulated settings, named like the flags."""

    mode: Mode = "sync"
    rollouts: int = 20
    rollout_batch_size: int = 32
    over_sampling_batch_size: int | None = None
    concurrency: int = 512
    """Maximum number of samples in flight (`--sglang-server-concurrency`)."""
    buffer: int | None = None
    """`--async-buffer-groups`; None: `rollout_batch_size`."""
    push_interval: int = 1
    """`--update-weights-interval`."""
    staleness: int | None = None
    """`--max-staleness`."""
    policy: Literal["recycle", "drop", "mask"] = "recycle"
    retries: int = 3
    partial: bool = False
    """`--partial-rollout`."""
    engines: int = 1
    eval_interval: int | None = None
    save_interval: int | None = None


@dataclass(frozen=True)
class Prediction:
    """The predicted timing and staleness of a run. Times start at the end of the first rollout's training."""

    step_seconds: float
    """Seconds from the end of one rollout's training to the end of the next one's."""
    trainer_idle: float
    """Share of the time without training."""
    engine_idle: float
    """Share of the time without generation."""
    active: float
    """Mean number of samples in generation."""
    staleness: dict[int, float]
    """Weight versions between a sample's first token and its training -> share of the trained samples."""
    wasted: float
    """Share of generated tokens that are not trained on."""
    queue: float
    """Mean number of finished groups that wait when training takes some."""
    total_seconds: float
    """Seconds of the whole run."""

    @property
    def mean_staleness(self) -> float:
        """Return the mean staleness in weight versions."""
        return sum(versions * share for versions, share in self.staleness.items())


def simulate(workload: Workload, plan: Plan) -> Prediction:
    """Simulate the plan on the workload. Raises ConfigError if the run would never end."""
    return _Run(workload, plan).run()


@dataclass(eq=False)
class _Group:
    """A prompt group in the simulation."""

    work: GroupWork
    left: list[float]
    """Tokens still to generate, by sample."""
    number: int
    """Sequence number in the order of drawing."""
    version: int | None = None
    """Version of the weights that sampled its first token."""
    retries: int = 0
    missing: int = 0
    requests: dict[int, Request] = field(default_factory=dict)
    """Requests by sample."""

    @property
    def finished(self) -> bool:
        return self.missing == 0


class _Run:
    def __init__(self, workload: Workload, plan: Plan) -> None:
        if not workload.groups:
            raise ConfigError("a prediction needs finished groups; the trace has none")
        self.work, self.plan = workload, plan
        self.now = 0.0
        self.version = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.engines = Engines(workload.speed, plan.engines, plan.concurrency, self.later)
        self._fresh = itertools.cycle(workload.groups)
        self._again: deque[_Group] = deque()
        """Returned groups, which are drawn first."""
        self._credit = 0.0
        self.in_flight: set[_Group] = set()
        self.waiting: deque[_Group] = deque()
        """Accepted groups that are not yet trained on."""
        self._wanted = 0
        """Number of groups that the current rollout still needs; sync and one-step only."""
        self._continuous = self._taking = False
        self._taken = 0
        """Number of rollouts taken for training."""
        self._taken_by = (0, 0)
        """A weight version, and the number of groups taken for training at this version."""
        self._staleness: Counter[int] = Counter()
        self._queues: list[int] = []
        self._wasted = 0.0
        self._ends: list[float] = []
        self._busy: list[float] = []
        self._idle_engine = 0.0
        self._area = 0.0

    # -- clock ---------------------------------------------------------------------------------------

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), action))

    def run(self) -> Prediction:
        process = self._loop()
        wait: Wait | None = next(process, None)
        for _ in range(_MOST_EVENTS):
            while wait is not None and callable(wait) and wait():
                wait = next(process, None)
            if wait is None:
                return self._prediction()
            if not callable(wait):
                woken: list[bool] = []
                self.later(wait, lambda woken=woken: woken.append(True))  # type: ignore[misc]
                wait = lambda woken=woken: bool(woken)  # noqa: E731
            timer = self._timers[0][0] - self.now if self._timers else float("inf")
            seconds = min(timer, self.engines.next_in())
            if seconds == float("inf"):
                raise ConfigError(
                    "with these settings the run would wait for ever: nothing is generated and training waits for"
                    f" {self.plan.rollout_batch_size} groups; raise async buffer or staleness"
                )
            self._pass(max(0.0, seconds))
        raise ConfigError(f"the prediction takes more than {_MOST_EVENTS} events; ask for fewer rollouts")

    def _pass(self, seconds: float) -> None:
        if self._ends and len(self._ends) < self.plan.rollouts:
            self._idle_engine += seconds * (self.engines.active == 0)
            self._area += seconds * self.engines.active
        self.now += seconds
        self.engines.advance(seconds)
        while self._timers and self._timers[0][0] <= self.now + 1e-12:
            heapq.heappop(self._timers)[2]()

    # -- the loop ------------------------------------------------------------------------------------

    def _loop(self) -> Iterator[Wait]:
        plan, work = self.plan, self.work
        yield from self._push()
        self._continuous = plan.mode == "full"
        if self._continuous:
            self._draw_on()
        elif plan.mode == "one-step":
            self._begin_wave()
        for rollout in range(plan.rollouts):
            if plan.mode == "sync":
                self._begin_wave()
            batch = yield from self._take()
            last = rollout + 1 == plan.rollouts
            if plan.mode == "one-step" and not last:
                self._begin_wave()
            yield from self._train(batch)
            if plan.mode == "sync" or last or (rollout + 1) % plan.push_interval == 0:
                if plan.mode == "one-step":
                    yield self._wave_done
                yield from self._push()
            if _due(plan.eval_interval, rollout, last):
                yield work.evaluate
            if last or _due(plan.save_interval, rollout, last):
                if plan.mode == "one-step":
                    yield self._wave_done
                yield work.save

    def _push(self) -> Iterator[Wait]:
        self.engines.paused = True
        yield self.work.push
        self.version += 1
        self.engines.paused = False

    def _take(self) -> Generator[Wait, None, list[_Group]]:
        size = self.plan.rollout_batch_size
        self._taking = True
        while True:
            if self._continuous:
                self._draw_on()
            yield lambda: len(self.waiting) >= size
            if self._sort_out():
                break
        self._taking = False
        self._queues.append(len(self.waiting))
        self.waiting = deque(sorted(self.waiting, key=lambda group: group.number))
        batch = [self.waiting.popleft() for _ in range(size)]
        self._taken += 1
        before, count = self._taken_by
        self._taken_by = self.version, size + (count if before == self.version else 0)
        if self._continuous:
            self._draw_on()
        return batch

    def _sort_out(self) -> bool:
        """Recycle or drop groups that are too old; return True if enough groups are left."""
        limit, plan = self.plan.staleness, self.plan
        if limit is None or plan.policy == "mask":
            return True
        fresh: deque[_Group] = deque()
        for group in self.waiting:
            if self._age(group) <= limit:
                fresh.append(group)
            elif plan.policy == "recycle" and group.retries < plan.retries:
                self._give_back(group, whole=True)
                group.retries += 1
            else:
                self._waste(group)
        self.waiting = fresh
        if self._continuous:
            self._draw_on()
        elif len(fresh) < plan.rollout_batch_size:
            self._wanted = plan.rollout_batch_size - len(fresh)
            self._refill()
        return len(fresh) >= plan.rollout_batch_size

    def _age(self, group: _Group) -> int:
        return self.version - (group.version if group.version is not None else self.version)

    def _train(self, batch: list[_Group]) -> Iterator[Wait]:
        limit = self.plan.staleness
        for group in batch:
            age = self._age(group)
            self._staleness[age] += len(group.work.tokens)
            if limit is not None and age > limit:
                self._waste(group)
        tokens = sum(sum(g.work.tokens) + g.work.prompt * len(g.work.tokens) for g in batch)
        seconds = self.work.train_seconds(tokens)
        yield seconds
        self._ends.append(self.now)
        self._busy.append(seconds)

    # -- generation ----------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self._again:
            group = self._again.popleft()
        else:
            work = next(self._fresh)
            group = _Group(work, [float(t) for t in work.tokens], next(self._numbers))
        group.requests = {}
        group.missing = sum(left > 0 for left in group.left)
        self.in_flight.add(group)
        if group.finished:
            self.later(0.0, lambda: self._complete(group))
        for i, left in enumerate(group.left):
            if left > 0:
                self._request(group, i, left)

    def _request(self, group: _Group, i: int, left: float) -> None:
        def started() -> None:
            if group.version is None:
                group.version = self.version

        def done() -> None:
            group.left[i] = 0.0
            group.missing -= 1
            if group.finished:
                self.later(group.work.group_after, lambda: self._complete(group))
            elif self._continuous:  # a long response does not hold the places of its group
                self._draw_on()

        request = Request(left, done, started, after=group.work.after)
        group.requests[i] = request
        self.engines.add(request)

    def _complete(self, group: _Group) -> None:
        if group not in self.in_flight:
            return
        self.in_flight.discard(group)
        self._credit += self.work.accepted
        kept = self._credit >= 1 - 1e-9
        self._credit -= kept
        if not kept:
            self._waste(group)
        if self._continuous:
            if kept:
                self.waiting.append(group)
            self._draw_on()
        elif kept:
            self.waiting.append(group)
            self._wanted -= 1
            if self._wanted == 0:
                self._end_wave()
        else:
            self._refill()

    def _begin_wave(self) -> None:
        plan = self.plan
        self._wanted = plan.rollout_batch_size
        for _ in range(max(plan.over_sampling_batch_size or 0, plan.rollout_batch_size)):
            self._draw()

    def _refill(self) -> None:
        while len(self.in_flight) < self._wanted:
            self._draw()

    def _wave_done(self) -> bool:
        return self._wanted == 0

    def _end_wave(self) -> None:
        for group in [*self.in_flight]:
            for i, request in group.requests.items():
                self.engines.cancel(request)
                group.left[i] = request.tokens
            self.in_flight.discard(group)
            self._give_back(group, whole=not self.plan.partial)
        self.engines.fill()

    def _give_back(self, group: _Group, *, whole: bool) -> None:
        if whole:
            self._waste(group)
            group.left = [float(t) for t in group.work.tokens]
            group.version = None
        self._again.append(group)

    def _waste(self, group: _Group) -> None:
        self._wasted += sum(group.work.tokens) - sum(group.left)

    def _draw_on(self) -> None:
        """Start groups while there is room, with the rule of `rollout/producer.py`."""
        for _ in range(self._room()):
            self._draw()

    def _room(self) -> int:
        plan, size = self.plan, self.plan.rollout_batch_size
        wanted = size if self._taking else 0
        if len(self.waiting) >= max(plan.buffer or size, wanted):
            return 0
        held = len(self.waiting) + len(self.in_flight)
        free = plan.concurrency - sum(group.missing for group in self.in_flight)
        room = math.ceil(free / len(self.work.groups[0].tokens))
        room = min(room, (plan.rollouts - self._taken) * size - held)
        if plan.staleness is not None:
            version, taken = self._taken_by
            taken = taken if version == self.version else 0
            fresh = (plan.staleness + 1) * plan.push_interval * size - taken - held
            room = min(room, max(fresh, wanted - held))
        return max(room, 0)

    # -- result --------------------------------------------------------------------------------------

    def _prediction(self) -> Prediction:
        ends = self._ends if len(self._ends) > 1 else [0.0, *self._ends]
        window = (ends[-1] - ends[0]) or float("inf")
        samples = sum(self._staleness.values())
        generated = self.engines.generated
        return Prediction(
            step_seconds=window / (len(ends) - 1),
            trainer_idle=max(0.0, 1 - sum(self._busy[-(len(ends) - 1) :]) / window),
            engine_idle=min(1.0, self._idle_engine / window),
            active=self._area / window,
            staleness={age: count / samples for age, count in sorted(self._staleness.items())},
            wasted=self._wasted / generated if generated else 0.0,
            queue=sum(self._queues) / len(self._queues),
            total_seconds=self.now,
        )


def _due(interval: int | None, rollout: int, last: bool) -> bool:
    return bool(interval) and (last or (rollout + 1) % interval == 0)  # type: ignore[operator]
