"""Run a training whose tokens and training steps only take time, without computation; used by `async_overlap.py`.

    real       both loops, rollout stage, rollout functions, reward stage, filters, ledger, flags
    simulated  an engine that gives each request a token every `token_seconds`, a trainer with a fixed time per token

Each sample has a fixed response length, so every mode generates and trains the same work. `run_case` runs in real time
(timers, no arithmetic: the processor is idle most of the time), or under the virtual clock of `tests.simulation`, where
the framework itself takes no time. Requests do not slow each other down, so each slot acts as a worker;
`--sglang-server-concurrency` is their number.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_testing_probes.scripted import CharTokenizer

from slime_core import loop
from slime_core.config import load_settings
from slime_core.rollout import ahead
from slime_core.rollout.event_loop import LoopThread
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.pool import generate_rollout
from slime_core.rollout.reward import RewardStage
from slime_core.rollout.stage import RolloutParts, RolloutStage
from slime_core.sample import Group, Sample, TrainBatch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # sys.path has the script's folder only
from tests.simulation.engine import SimulatedEngine, SimulatedGenerator
from tests.simulation.loop import SimulatedLoop, VirtualClock
from tests.simulation.threads import Runner, Threads


def long_tail(num_samples: int, median: float, sigma: float, cap: float, seed: int) -> list[int]:
    """Return response lengths in tokens: log-normal around `median`, at most `cap` times `median`."""
    rng = random.Random(seed)
    return [max(1, round(median * min(rng.lognormvariate(0.0, sigma), cap))) for _ in range(num_samples)]


@dataclass(frozen=True)
class Case:
    """The settings of a simulated run."""

    flags: Sequence[str]
    """Flags of `slime train`: the mode and its settings."""
    lengths: Sequence[int]
    """Response length in tokens, by the sample's number."""
    num_rollout: int
    rollout_batch_size: int
    group_size: int
    slots: int
    """Number of requests that the engine runs at the same time."""
    token_seconds: float
    train_token_seconds: float
    """Seconds of training per token."""


@dataclass
class Trace:
    """The measurements of a run."""

    trained: list[tuple[float, float, int]] = field(default_factory=list)
    """Begin and end of each rollout's training in seconds, and its response tokens."""
    generated: list[float] = field(default_factory=list)
    """Seconds of each rollout's generation; only without `--async`."""
    busy: list[float] = field(default_factory=list)
    """Slot-seconds of work by the engine until the end of each training."""
    ages: list[Counter[int]] = field(default_factory=list)
    """Histogram per rollout: weight versions between a sample's oldest token and its training -> samples."""
    wasted: float = 0.0
    """Number of generated and discarded tokens."""
    late: list[float] = field(default_factory=list)
    """Delay of each response in seconds beyond its tokens' time; it is large on a busy machine."""


class LongTailEngine(SimulatedEngine):
    """A `SimulatedEngine` with given lengths and a fixed pace that measures its work; a prompt is its number."""

    def __init__(self, case: Case) -> None:
        super().__init__(lambda place: None, random.Random(0), 0)
        self._case = case
        self._area, self._since = 0.0, 0.0
        self.late: list[float] = []

    def wanted_length(self, input_ids: Sequence[int], seed: int) -> int:
        """Return the sample's response length minus its present tokens."""
        return self._case.lengths[input_ids[0]] + 1 - len(input_ids)

    def token_seconds(self) -> float:
        """Return the seconds per token, equal for all requests."""
        return self._case.token_seconds

    async def _run(self, length: int, rid: str | None, fault: str | None) -> Any:
        self.busy()
        started = time.perf_counter()
        try:
            how, request = await super()._run(length, rid, fault)
        finally:
            # The request has left `running`, but occupied a slot until now.
            self.busy(1)
        if how == "done":
            self.late.append(time.perf_counter() - started - length * self._case.token_seconds)
        return how, request

    def busy(self, leaving: int = 0) -> float:
        """Return the slot-seconds of work, by the clock of the run."""
        now = time.perf_counter()
        self._area += (now - self._since) * (len(self.running) + leaving) if self._since else 0.0
        self._since = now
        return self._area


class _Prompts:
    """A data source without a file: groups in order, returned groups first."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._next = 0
        self._back: list[Group] = []

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return the next groups."""
        groups, self._back = self._back[:num_samples], self._back[num_samples:]
        first, self._next = self._next, self._next + num_samples - len(groups)
        size = self._group_size
        return groups + [
            [Sample(group_index=g, index=g * size + i, tokens=[g * size + i]) for i in range(size)]
            for g in range(first, self._next)
        ]

    def add_samples(self, samples: list[Group]) -> None:
        """Return groups to the source."""
        self._back += samples


class _Reward:
    """A reward without cost."""

    label, spec = "reward 'none'", "none"
    provenance: Mapping[str, Any] = {}
    batched = scores_groups = False

    async def start(self) -> None:
        """Do nothing; there is nothing to load."""

    async def score(self, samples: list[Sample], evaluation: bool) -> list[Any]:
        """Return a reward of 1 for each sample."""
        return [1.0 for _ in samples]


class _World:
    """The parts of a run, in real time, or in virtual time with a `clock`."""

    def __init__(self, case: Case, clock: VirtualClock | None) -> None:
        self.case, self.clock = case, clock
        self.args = _args(case)
        self.engine = LongTailEngine(case)
        self.trace = Trace(late=self.engine.late)
        self.simulated = None
        runner: Any = None
        if clock is not None:
            self.simulated = SimulatedLoop(random.Random(0), clock, max_turns=1 << 30)
            runner = Runner(self.simulated, Threads(self.simulated))
        elif self.args.async_training:
            runner = LoopThread()
        self.stage = RolloutStage(self.args, self._parts(), runner)
        self._version = 0

    def _parts(self) -> RolloutParts:
        return RolloutParts(
            data_source=_Prompts(self.case.group_size), rollout_function=generate_rollout, eval_function=None,
            tokenizer=CharTokenizer(), engine=self.engine,  # type: ignore[arg-type]
            generator=SimulatedGenerator(0, failing=0.0, fan_out=0.0, two_turns=0.0),
            rewards=RewardStage(self.args, _Reward(), _no_other), filters=FilterStage(self.args, None),
            resolve_generator=_no_other,
        )  # fmt: skip

    # -- the loop's stages, without --async -------------------------------------------------------------

    def generate(self, rollout_id: int) -> Any:
        started = time.perf_counter()
        result = self.stage.generate(rollout_id)
        self.trace.generated.append(time.perf_counter() - started)
        return result

    def before_push(self) -> None:
        """Do nothing: no generation runs ahead."""

    def before_save(self) -> None:
        """Do nothing: no generation runs ahead."""

    def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        started, seconds = time.perf_counter(), self._train_seconds(batch)
        if self.clock is None:
            time.sleep(seconds)
        else:
            self.clock.now += seconds
        self._note(batch, started)
        return {}

    def push(self) -> dict[str, float]:
        self._version += 1
        self.stage.update_weights("tensor", (), self._version)
        return {}

    def step_end(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self.trace.wasted += metrics.get("rollout/wasted_tokens", 0.0)

    def save(self, rollout_id: int) -> None:
        """Save a checkpoint, which takes no time here."""

    def _train_seconds(self, batch: TrainBatch) -> float:
        return sum(batch.response_lengths) * self.case.train_token_seconds

    def _note(self, batch: TrainBatch, started: float) -> None:
        trace, versions = self.trace, batch.token_weight_versions
        oldest = [min(v) for v in versions] if versions else [batch.weight_version] * len(batch)
        trace.ages.append(Counter(batch.weight_version - version for version in oldest))
        trace.trained.append((started, time.perf_counter(), sum(batch.response_lengths)))
        trace.busy.append(self.engine.busy())

    # -- running --------------------------------------------------------------------------------------

    def run(self) -> Trace:
        if not self.args.async_training:
            self.stage.start()
            try:
                loop.now(loop.train(self.args, loop.Stages(self, self, self, self), 0))  # type: ignore[arg-type]
            finally:
                self.stage.stop()
        elif self.simulated is None:
            asyncio.run(_Async(self).run())
        else:
            self.simulated.run(_Async(self).run())
        return self.trace


class _Async:
    """The stages of a world for `--async`, which run concurrently."""

    def __init__(self, world: _World) -> None:
        self._world = world

    async def run(self) -> None:
        world = self._world
        rollout = ahead.Ahead(world.args, world.stage)
        try:
            await rollout.start()
            await loop.train(world.args, loop.Stages(rollout, self, self, self), 0)  # type: ignore[arg-type]
        finally:
            await rollout.stop()

    async def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        started = time.perf_counter()
        await asyncio.sleep(self._world._train_seconds(batch))
        self._world._note(batch, started)
        return {}

    async def push(self) -> dict[str, float]:
        return await self._world.stage.loop_thread().in_thread(self._world.push)

    async def step_end(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self._world.step_end(rollout_id, metrics)

    async def save(self, rollout_id: int) -> None:
        """Save a checkpoint, which takes no time here."""


def _args(case: Case) -> Any:
    """Load the settings as `slime train` does; the inputs are named but never read."""
    argv = ["--hf-checkpoint", "none", "--prompt-data", "none.jsonl", "--rm-type", "none", "--run-dir", "none"]
    argv += ["--rollout-batch-size", str(case.rollout_batch_size), "--n-samples-per-prompt", str(case.group_size)]
    argv += ["--num-rollout", str(case.num_rollout), "--sglang-server-concurrency", str(case.slots)]
    argv += ["--rollout-max-response-len", str(max(case.lengths)), *case.flags]
    args = load_settings(argv, command="train", env={}).args
    args.run_dir = None
    args.over_sampling_batch_size = args.over_sampling_batch_size or args.rollout_batch_size
    return args


def _no_other(spec: str) -> Any:
    raise LookupError(f"the run has no component {spec!r}")


@contextmanager
def _installed(clock: VirtualClock | None) -> Iterator[None]:
    if clock is None:
        yield
        return
    with clock.installed():
        yield


def run_case(case: Case, *, virtual: bool) -> Trace:
    """Run a case to its end."""
    clock = VirtualClock() if virtual else None
    with _installed(clock):
        world = _World(case, clock)
        try:
            return world.run()
        finally:
            if world.simulated is not None:
                world.simulated.discard()
