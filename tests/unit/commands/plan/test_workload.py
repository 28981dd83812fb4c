"""From a trace to predictions, held against a run in virtual time that shares no code with the event model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slime_commands.plan.predict import changed, predictions
from slime_commands.plan.simulate import Plan
from slime_commands.plan.workload import read_workload
from slime_runs.timeline import FILE, Timeline

from slime_core.config import Args
from slime_core.errors import ConfigError

STEP, SHARE, REWARD, TRAIN, PUSH = 0.02, 0.001, 0.3, 6.0, 0.5
"""Seconds: of a decode step, of each sample in it, of a reward, of training, of a push."""
BATCH, EACH, PLACES, ROLLOUTS = 8, 4, 24, 12


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeping takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class VirtualTimeline(Timeline):
    def now(self) -> float:
        return asyncio.get_running_loop().time()


class Engine:
    """Continuous batching, one decode step at a time."""

    def __init__(self, timeline: Timeline | None) -> None:
        self.places = asyncio.Semaphore(PLACES)
        self.active: dict[asyncio.Future[None], int] = {}
        self.timeline = timeline
        self.paused = False
        self.version = 0
        self.unfinished = 0
        """Samples of the groups in flight; for `full_run`, which counts them in."""
        self.news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def _step(self) -> None:
        while self.active:
            await asyncio.sleep(STEP + SHARE * len(self.active))
            if self.paused:
                continue
            for future in list(self.active):
                self.active[future] -= 1
                if self.active[future] == 0:
                    del self.active[future]
                    future.set_result(None)

    async def sample(self, rollout: int, group: int, index: int, tokens: int) -> int:
        async with self.places:
            loop = asyncio.get_running_loop()
            started, version, future = loop.time(), self.version, loop.create_future()
            self.active[future] = tokens
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._step())
            await future
            generated = loop.time()
            await asyncio.sleep(REWARD)
            self.unfinished -= 1
            self.news.set()
            if self.timeline:
                sample = SimpleNamespace(
                    response_length=tokens, tokens=[0] * (tokens + 10), token_weight_versions=[version],
                    weight_versions=["1"], group_index=group, index=index, status="completed", non_generation_time=0.0,
                )  # fmt: skip
                times = started, started, generated, loop.time()
                self.timeline.sample([sample], times, 0, 0.0, SimpleNamespace(rollout_id=rollout, evaluation=False))
            return version

    async def group(self, rollout: int, number: int) -> list[int]:
        rng = random.Random(number)
        lengths = [min(400, max(2, round(rng.lognormvariate(4.0, 0.8)))) for _ in range(EACH)]
        return list(
            await asyncio.gather(*(self.sample(rollout, number, number * EACH + i, n) for i, n in enumerate(lengths)))
        )

    async def wave(self, rollout: int) -> list[list[int]]:
        return await asyncio.gather(*(self.group(rollout, rollout * BATCH + i) for i in range(BATCH)))


def run_args(**changes: Any) -> Args:
    values = {
        "rollout_batch_size": BATCH, "n_samples_per_prompt": EACH, "num_rollout": ROLLOUTS,
        "sglang_server_concurrency": PLACES,
    }  # fmt: skip
    return Args(**{**values, **changes})


async def sync_run(timeline: Timeline | None) -> list[float]:
    """When each training ended."""
    engine, loop, ends = Engine(timeline), asyncio.get_running_loop(), []
    if timeline:
        timeline.begin(run_args(), 0)
    for rollout in range(ROLLOUTS):
        started = loop.time()
        await engine.wave(rollout)
        if timeline:
            timeline.span("rollout", started, r=rollout, groups_drawn=float(BATCH), groups_given_back=0.0)
        started = loop.time()
        await asyncio.sleep(TRAIN)
        ends.append(loop.time())
        if timeline:
            timeline.span("train", started, r=rollout)
        started = loop.time()
        await asyncio.sleep(PUSH)
        if timeline:
            timeline.span("push", started)
    return ends


async def one_step_run() -> list[float]:
    engine, loop, ends = Engine(None), asyncio.get_running_loop(), []
    ahead = asyncio.create_task(engine.wave(0))
    for rollout in range(ROLLOUTS):
        await ahead
        ahead = asyncio.create_task(engine.wave(rollout + 1))
        await asyncio.sleep(TRAIN)
        ends.append(loop.time())
        await ahead
        await asyncio.sleep(PUSH)
    return ends


async def full_run(rollouts: int, buffer: int) -> tuple[list[float], list[int]]:
    """When each training ended, and the staleness of every trained sample."""
    engine, loop, ends, ages = Engine(None), asyncio.get_running_loop(), [], []
    finished: dict[int, list[int]] = {}
    flying: dict[int, asyncio.Task[list[int]]] = {}
    drawn = 0

    def look() -> None:
        """Collect whole groups; a place that a sample leaves is for the next group, as in `producer.room`."""
        nonlocal drawn
        engine.news.clear()
        for number in [n for n, task in flying.items() if task.done()]:
            finished[number] = flying.pop(number).result()
        while len(finished) < buffer and engine.unfinished < PLACES and drawn < rollouts * BATCH:
            engine.unfinished += EACH
            flying[drawn] = asyncio.create_task(engine.group(0, drawn))
            flying[drawn].add_done_callback(lambda _: engine.news.set())
            drawn += 1

    for _ in range(rollouts):
        look()
        while len(finished) < BATCH:
            await engine.news.wait()
            look()
        for number in sorted(finished)[:BATCH]:
            ages += [engine.version - version for version in finished.pop(number)]
        training = asyncio.create_task(asyncio.sleep(TRAIN))
        training.add_done_callback(lambda _: engine.news.set())
        while not training.done():  # generation goes on
            look()
            await engine.news.wait()
        ends.append(loop.time())
        engine.paused = True
        await asyncio.sleep(PUSH)
        engine.paused, engine.version = False, engine.version + 1
    return ends, ages


def virtually(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def step_of(ends: list[float]) -> float:
    return (ends[-1] - ends[0]) / (len(ends) - 1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace")
    virtually(sync_run(VirtualTimeline(path / FILE)))
    return path


def test_speed_is_found_again(trace: Path) -> None:
    workload, _ = read_workload(trace)
    assert workload.speed.per_step == pytest.approx(STEP, rel=0.15)
    assert workload.speed.per_active == pytest.approx(SHARE, rel=0.25)
    assert workload.train_seconds(10_000) == pytest.approx(TRAIN)
    assert workload.push == pytest.approx(PUSH)
    assert len(workload.groups) == BATCH * ROLLOUTS
    assert {len(g.tokens) for g in workload.groups} == {EACH}
    assert workload.groups[0].after == pytest.approx(REWARD)
    assert workload.groups[0].prompt == 10


def test_same_settings_are_predicted(trace: Path) -> None:
    workload, recorded = read_workload(trace)
    ((_, plan, own),) = predictions(workload, recorded, [])
    assert plan.mode == "sync"
    assert own.step_seconds == pytest.approx(recorded.step_seconds, rel=0.05)
    assert own.trainer_idle == pytest.approx(recorded.trainer_idle, abs=0.05)
    assert own.engine_idle == pytest.approx(recorded.engine_idle, abs=0.05)


def test_one_step_is_predicted_from_a_synchronous_trace(trace: Path) -> None:
    workload, recorded = read_workload(trace)
    _, (_, _, found) = predictions(workload, recorded, [f"async=one-step,rollouts={ROLLOUTS}"])
    assert found.step_seconds == pytest.approx(step_of(virtually(one_step_run())), rel=0.1)


def test_full_is_predicted_from_a_synchronous_trace(trace: Path) -> None:
    workload, recorded = read_workload(trace)
    ends, ages = virtually(full_run(2 * ROLLOUTS, BATCH))
    _, (_, _, found) = predictions(workload, recorded, [f"async=full,buffer={BATCH},rollouts={2 * ROLLOUTS}"])
    assert found.step_seconds == pytest.approx(step_of(ends), rel=0.15)
    assert found.mean_staleness == pytest.approx(sum(ages) / len(ages), abs=0.5)
    assert found.step_seconds < 0.8 * recorded.step_seconds


# -- reading -----------------------------------------------------------------------------------------------


def test_only_the_last_start_counts_and_partial_samples_add_up(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / FILE)
    timeline.begin(run_args(), 0)
    timeline.span("train", 0.0, r=0)
    timeline.begin(run_args(rollout_batch_size=1), 1)
    cut = {"r": 1, "g": 4, "i": 9, "p": 2, "turns": 1, "v": 1}
    timeline._write({"e": "sample", **cut, "t": [0, 1, 1], "k": 0, "n": 10, "s": "aborted"})
    timeline._write({"e": "sample", **cut, "t": [2, 3, 3.5], "k": 10, "n": 5, "s": "completed"})
    timeline._write({"e": "sample", **cut, "g": 5, "t": [2, 3, 3], "k": 0, "n": 5, "s": "aborted"})
    timeline._write({"e": "scored", "g": 4, "t": [3.5, 4.5]})
    for rollout in (1, 2):
        timeline._write({"e": "rollout", "r": rollout, "t": [0, 1], "tokens": 20, "groups_drawn": 2.0})
        timeline._write({"e": "train", "r": rollout, "t": [5 * rollout, 5 * rollout + 2]})
    timeline.flush()
    workload, recorded = read_workload(tmp_path)
    (group,) = workload.groups
    assert (group.tokens, group.after, group.group_after) == ((15,), 0.5, 1.0)
    assert workload.accepted == 0.5
    assert workload.train_seconds(40) == pytest.approx(4.0)
    assert recorded.steps == 2
    assert recorded.step_seconds == 5


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--no-trace"):
        read_workload(tmp_path)
    Timeline(tmp_path / FILE).begin(run_args(), 0)
    with pytest.raises(ConfigError, match="0 trained rollouts and 0 samples"):
        read_workload(tmp_path)


# -- what if -----------------------------------------------------------------------------------------------


def test_changes_of_a_plan() -> None:
    plan = changed(
        Plan(over_sampling_batch_size=40), "async=full,staleness=4, engines=2,rollout-batch-size=16,partial=on"
    )
    assert (plan.mode, plan.staleness, plan.engines, plan.rollout_batch_size) == ("full", 4, 2, 16)
    assert plan.over_sampling_batch_size is None
    assert plan.partial
    assert changed(plan, "staleness=none").staleness is None


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("async=half", "'half' is no value of async; it must be one of sync, one-step, full"),
        ("stalenes=4", "Did you mean staleness?"),
        ("engines", "NAME=VALUE"),
        ("engines", "Did you mean engines=VALUE?"),
        ("engines=0", "no value of engines; it must be a whole number of at least 1"),
        ("async=full,staleness=few", "no value of staleness; it must be a whole number of at least 0, or none"),
        ("eval-interval=0", "must be a whole number of at least 1, or none"),
        ("staleness=1", "staleness has no effect with async=sync; add async=one-step or async=full"),
        ("async=one-step,buffer=8", "buffer has no effect with async=one-step; add async=full"),
        ("async=full,policy=drop", "policy has no effect without a limit; add staleness=K"),
    ],
)
def test_changes_that_are_none(what: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        changed(Plan(), what)
    assert complaint in str(raised.value)
