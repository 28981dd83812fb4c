"""Where a reward runs, how many at once, and when its clock starts."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from slime_core.config import Args
from slime_core.errors import PluginError
from slime_core.plugins import adapters
from slime_core.plugins.adapters import RewardCaller, execution_of
from slime_core.plugins.registry import Registry
from slime_core.plugins.resolve import resolve
from slime_core.protocols import RewardTraits, declares
from slime_core.sample import Sample
from slime_core.workers.call import DeadlineExceeded, Slots
from tests.virtual_time import in_virtual_time


def caller(function, **args) -> RewardCaller:
    registry = Registry()
    registry.add_object("rewards", "mine", function)
    args = {"reward_key": None, "rm_timeout": 5.0, **args}
    return RewardCaller(resolve("rewards", "mine", registry=registry), Args(**args))


@pytest.mark.parametrize(
    ("declared", "is_async", "expected"),
    [
        (None, False, "process"), (None, True, "async"), ("inline", False, "inline"), ("thread", False, "thread"),
        ("process", False, "process"), ("process", True, "process"), ("inline", True, "async"),
    ],
)  # fmt: skip
def test_what_is_declared_wins_over_the_default(declared: str | None, is_async: bool, expected: str) -> None:
    component = SimpleNamespace(traits=RewardTraits(execution=declared))
    assert execution_of(component, "it", is_async=is_async, default="process") == expected


def test_other_words_are_refused_with_the_choice() -> None:
    with pytest.raises(PluginError, match="it: execution = 'fork'; write one of 'inline', 'thread', 'process'"):
        execution_of(SimpleNamespace(traits=RewardTraits(execution="fork")), "it", is_async=False, default="thread")
    with pytest.raises(PluginError, match="it is async"):
        execution_of(SimpleNamespace(traits=RewardTraits(execution="thread")), "it", is_async=True, default="thread")


def test_a_wrong_declaration_is_refused_when_the_reward_is_resolved() -> None:
    @declares(RewardTraits(execution="procss"))
    def reward(args, sample):
        return 0.0

    with pytest.raises(PluginError, match="reward 'mine': execution = 'procss'"):
        caller(reward)


async def turns() -> None:
    """Of the event loop, for what is ready and for deadlines that have passed."""
    for _ in range(10):
        await asyncio.sleep(0)


@in_virtual_time
async def test_async_calls_are_bounded_and_waiting_does_not_count_against_the_deadline() -> None:
    now = peak = 0

    async def reward(args, sample):
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        await asyncio.sleep(0.03)
        now -= 1
        return 1.0

    call = caller(reward, rm_concurrency=2, rm_timeout=0.2)  # 0.3 s for all twenty
    found = await asyncio.gather(*(call.score([Sample(index=i)]) for i in range(20)))
    assert found == [[1.0]] * 20
    assert peak == 2


async def test_waiting_for_a_thread_does_not_count_against_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "THREADS", Slots(1))
    busy, release = threading.Event(), threading.Event()

    def holds(args, sample):
        busy.set()
        return float(release.wait(60))

    holder = asyncio.create_task(caller(holds, rm_timeout=None).score([Sample(index=0)]))
    await asyncio.to_thread(busy.wait, 60)
    call = caller(lambda args, sample: 1.0, rm_timeout=60.0)
    assert call.execution == "thread"
    waiting = [asyncio.create_task(call.score([Sample(index=i)])) for i in range(3)]
    await turns()
    loop = asyncio.get_running_loop()
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + 100)
    await turns()
    assert not any(task.done() for task in waiting)
    release.set()
    assert await asyncio.gather(holder, *waiting) == [[1.0]] * 4


async def test_a_thread_that_overruns_is_given_up() -> None:
    never = threading.Event()
    call = caller(lambda args, sample: never.wait(30) or 1.0, rm_timeout=0.05)
    with pytest.raises(DeadlineExceeded, match=r"--rm-timeout 0.05 s"):
        await call.score([Sample(index=0)])
    never.set()


def test_code_that_has_no_address_runs_on_threads_even_with_workers() -> None:
    def unused():
        raise AssertionError

    registry = Registry()
    registry.add_object("rewards", "mine", lambda args, sample: 1.0)
    resolved = resolve("rewards", "mine", registry=registry)
    call = RewardCaller(resolved, Args(reward_key=None), workers=unused, spec="mine")
    assert call.execution == "thread"
