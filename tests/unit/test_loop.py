"""The loop: which verb comes when, over stages that only record."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core import loop
from slime_core.config import Args
from slime_core.errors import RolloutInterrupted


class Fakes:
    """All stages in one: each verb is a word in `said`. Background work ends when its event is set."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.unfinished_at: dict[int, list[int]] = {}
        self.evaluating: asyncio.Event | None = None
        self.interrupted_at: int | None = None
        self.stops_after: int | None = None
        self.stages = loop.Stages(self, self, self, self, self.stop_asked)  # type: ignore[arg-type]

    def stop_asked(self) -> bool:
        return self.stops_after is not None and f"end {self.stops_after}" in self.said

    async def generate(self, rollout_id: int) -> Any:
        if rollout_id == self.interrupted_at:
            raise RolloutInterrupted()
        self.said.append(f"take {rollout_id}")
        return SimpleNamespace(batch=f"batch {rollout_id}", metrics={"rollout/x": float(rollout_id)})

    async def train(self, rollout_id: int, batch: Any) -> dict[str, float]:
        assert batch == f"batch {rollout_id}"
        self.said.append(f"train {rollout_id}")
        await asyncio.sleep(0)
        return {"train/x": 1.0}

    async def before_push(self) -> None:
        self.said.append("before_push")

    async def push(self) -> dict[str, float]:
        self.said.append("push")
        return {"perf/push": 1.0}

    async def before_save(self) -> None:
        self.said.append("before_save")

    async def save(self, rollout_id: int) -> None:
        self.said.append(f"save {rollout_id}")
        self.unfinished_at[rollout_id] = list(self.stages.unfinished)

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        self.said.append(f"evaluate {rollout_id}")
        if self.evaluating is not None:
            await self.evaluating.wait()
        self.said.append(f"evaluated {rollout_id}")
        return {"eval/x": float(rollout_id)}

    async def log(self, step: int, metrics: dict[str, float]) -> None:
        if metrics:
            self.said.append(f"log {step}")
            self.metrics.setdefault(step, {}).update(metrics)

    async def step_end(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self.said.append(f"end {rollout_id}")
        self.metrics.setdefault(rollout_id + 1, {}).update(metrics)

    def run(self, start: int = 0, **settings: Any) -> int:
        args = Args(**{"num_rollout": 2, "async_training": True, **settings})
        return asyncio.run(asyncio.wait_for(loop.train(args, self.stages, start), 60))


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def test_weights_are_pushed_after_each_rollout_and_commits_come_last(fakes: Fakes) -> None:
    assert fakes.run(eval_interval=2, save_interval=1) == 2
    assert fakes.said == words(
        "push, evaluate 0, evaluated 0, log 0,"
        "take 0, train 0, before_push, push, end 0, before_save, save 0,"
        "take 1, train 1, before_push, push, evaluate 1, evaluated 1, end 1, before_save, save 1"
    )


@pytest.mark.parametrize(
    ("minutes", "seconds", "interval", "saved"),
    [
        (10, 240, None, [1, 3, 5, 6]),  # a third rollout would end after ten minutes
        (10, 240, 100, [6]),
        (10, 1200, None, [0, 1, 2, 3, 4, 5, 6]),
        (10, 10, None, [6]),
        (1, 25, None, [1, 3, 5, 6]),
    ],
)
def test_a_commit_is_made_at_least_every_so_many_minutes(
    fakes: Fakes,
    monkeypatch: pytest.MonkeyPatch,
    minutes: float,
    seconds: float,
    interval: int | None,
    saved: list[int],
) -> None:
    monkeypatch.setattr(loop.time, "perf_counter", lambda: seconds * sum(word.startswith("end") for word in fakes.said))
    fakes.run(num_rollout=7, save_interval=interval, save_minutes=minutes, async_training=False)
    assert [int(word.removeprefix("save ")) for word in fakes.said if word.startswith("save ")] == saved


def test_metrics_of_all_verbs_meet_in_the_step(fakes: Fakes) -> None:
    fakes.run(eval_interval=1, skip_eval_before_train=True)
    assert {"rollout/x", "train/x", "perf/push", "eval/x"} <= fakes.metrics[1].keys()
    assert 0.0 <= fakes.metrics[1]["perf/trainer_idle_fraction"] <= 1.0
    assert fakes.metrics[1]["perf/trainer_wait_time"] >= 0.0
    assert 0 not in fakes.metrics


def test_a_run_goes_on_where_it_is_told_to(fakes: Fakes) -> None:
    assert fakes.run(start=3, num_rollout=4, eval_interval=4) == 4
    assert fakes.said == words(
        "push, take 3, train 3, before_push, push, evaluate 3, evaluated 3, end 3, before_save, save 3"
    )


async def test_an_evaluation_in_the_background_stops_the_next_push_and_nothing_else(fakes: Fakes) -> None:
    fakes.evaluating = asyncio.Event()
    changes: dict[str, Any] = {"update_weights_interval": 2, "eval_interval": 1, "eval_in_background": True}
    args = Args(num_rollout=3, async_training=True, **changes)
    running = asyncio.create_task(loop.train(args, fakes.stages, 0))
    while "train 0" not in fakes.said:
        await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert sorted(fakes.said) == sorted(words("push, take 0, evaluate 0, train 0"))  # one evaluation at a time
    fakes.evaluating.set()
    await running
    pushes = [i for i, word in enumerate(fakes.said) if word == "push"]
    begun, ended = (
        [i for i, word in enumerate(fakes.said) if word.startswith(what)] for what in ("evaluate ", "evaluated ")
    )
    assert len(begun) == len(ended) == 4
    for first, last in zip(begun, ended, strict=True):
        assert not any(first < push < last for push in pushes)
    assert {step: m["eval/x"] for step, m in fakes.metrics.items()} == {0: 0.0, 1: 0.0, 2: 1.0, 3: 2.0}


async def test_a_commit_remembers_the_evaluation_of_its_weights_and_waits_for_older_ones(fakes: Fakes) -> None:
    fakes.evaluating = asyncio.Event()
    args = Args(
        num_rollout=4, update_weights_interval=4, eval_interval=2, skip_eval_before_train=True,
        save_interval=1, eval_in_background=True, async_training=True,
    )  # fmt: skip
    running = asyncio.create_task(loop.train(args, fakes.stages, 0))
    while "end 2" not in fakes.said:
        await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert "save 1" in fakes.said
    assert "save 2" not in fakes.said  # it would forget the evaluation of step 2
    fakes.evaluating.set()
    await running
    assert fakes.unfinished_at == {0: [], 1: [2], 2: [], 3: [4]}
    assert fakes.stages.unfinished == []


def test_an_unfinished_evaluation_is_done_first(fakes: Fakes) -> None:
    fakes.stages.unfinished.append(2)
    fakes.run(start=2, num_rollout=3)
    assert fakes.said[:4] == words("push, evaluate 1, evaluated 1, log 2")
    assert fakes.stages.unfinished == []


def test_a_failed_evaluation_in_the_background_ends_the_run(fakes: Fakes) -> None:
    async def fails(rollout_id: int) -> dict[str, float]:
        raise ValueError("no such data")

    fakes.evaluate = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such data"):
        fakes.run(eval_interval=1, eval_in_background=True)
    assert "before_push" not in fakes.said


@pytest.mark.parametrize("background", [False, True])
def test_an_interrupted_evaluation_is_left_to_the_continuation(fakes: Fakes, background: bool) -> None:
    async def interrupted(rollout_id: int) -> dict[str, float]:
        raise RolloutInterrupted(drew=False)

    fakes.evaluate = interrupted  # type: ignore[method-assign]
    settings: dict[str, Any] = {"eval_interval": 2, "skip_eval_before_train": True, "eval_in_background": background}
    assert fakes.run(num_rollout=2, **settings) == 2  # the last one, which nothing comes after
    assert fakes.said[-2:] == words("before_save, save 1")
    assert fakes.unfinished_at == {1: [2]}
    assert not any("eval/x" in metrics for metrics in fakes.metrics.values())


def test_an_interrupted_evaluation_of_older_weights_is_given_up(fakes: Fakes, caplog: pytest.LogCaptureFixture) -> None:
    """In the background, of step 1, while the trainer trains on rollout 1: no commit has its weights."""

    async def interrupted(rollout_id: int) -> dict[str, float]:
        while "train 1" not in fakes.said:
            await asyncio.sleep(0)
        fakes.stops_after = 1
        raise RolloutInterrupted(drew=False)

    fakes.evaluate = interrupted  # type: ignore[method-assign]
    settings: dict[str, Any] = {"eval_interval": 1, "skip_eval_before_train": True, "eval_in_background": True}
    fakes.run(num_rollout=2, **settings)
    assert "the evaluation of step 1 was interrupted" in caplog.text
    assert fakes.unfinished_at == {1: [2]}


def test_asked_to_stop_it_commits_what_is_done(fakes: Fakes) -> None:
    fakes.stops_after = 1
    assert fakes.run(num_rollout=9) == 2
    assert fakes.said[-3:] == words("end 1, before_save, save 1")


def test_an_interrupted_rollout_repeats_the_last_commit_with_what_was_given_back(fakes: Fakes) -> None:
    fakes.interrupted_at = 2
    assert fakes.run(num_rollout=9, save_interval=1) == 2
    assert fakes.said[-2:] == words("before_save, save 1")
    assert fakes.said.count("save 1") == 2
