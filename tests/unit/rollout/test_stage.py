"""How a stage runs rollout functions: plain ones beside its event loop where they may post to the engine."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from slime_core.config import Args
from slime_core.rollout import event_loop
from slime_core.rollout.event_loop import LoopThread
from slime_core.rollout.stage import RolloutParts, RolloutStage
from slime_core.sample import Sample


def stage_of(function: Any, *, needs_address: bool) -> RolloutStage:
    parts = RolloutParts(
        data_source=object(), rollout_function=function, eval_function=function, needs_address=needs_address
    )
    return RolloutStage(Args.model_construct(), parts)


def answer() -> list[list[Sample]]:
    return [[Sample(tokens=[1, 2], response_length=1, reward=1.0, status=Sample.Status.COMPLETED, group_index=0)]]


def test_the_loop_turns_beside_a_plain_function() -> None:
    async def served() -> threading.Thread:
        return threading.current_thread()

    seen: list[threading.Thread] = []

    def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[list[Sample]]:
        # What a post to an engine that serves in the stage's loop comes down to.
        asked = asyncio.run_coroutine_threadsafe(served(), stage._loop.get_loop())
        seen.extend([asked.result(timeout=30), threading.current_thread()])
        return answer()

    stage = stage_of(rollout, needs_address=True)
    groups, _ = stage.generate_groups(0)
    stage.stop()
    assert groups[0][0].reward == 1.0
    assert seen[0] is threading.main_thread()
    assert seen[1] is not threading.main_thread()


def test_what_runs_is_abandoned_and_the_stage_goes_on() -> None:
    begun, calls = threading.Event(), []

    async def function(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        calls.append(rollout_id)
        begun.set()
        if len(calls) == 1:
            await asyncio.get_running_loop().create_future()
        return answer()

    stage = stage_of(function, needs_address=False)
    stage._loop = LoopThread()
    ended: list[type[BaseException]] = []

    def generate() -> None:
        try:
            stage.generate_groups(0)
        except BaseException as error:
            ended.append(type(error))

    thread = threading.Thread(target=generate)
    thread.start()
    assert begun.wait(60)
    stage.abandon()
    thread.join(60)
    assert ended == [asyncio.CancelledError]
    groups, _ = stage.generate_groups(0)
    assert len(groups) == len(answer())
    stage.stop()


# -- an event loop in a thread of its own, used by several threads at once -------------------------------


@pytest.fixture
def loop() -> LoopThread:
    return LoopThread()


def test_close_cancels_what_runs_and_tells_its_caller(loop: LoopThread) -> None:
    started, seen = threading.Event(), list[str]()

    async def long() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    def call() -> None:
        try:
            loop.run(long())
        except asyncio.CancelledError:
            seen.append("told")

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert started.wait(60)
    loop.close()
    caller.join(60)
    assert seen == ["ended", "told"]
    assert loop._thread is not None
    assert not loop._thread.is_alive()


def test_an_interrupted_caller_cancels_its_coroutine(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), threading.Event()

    async def long() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    submit = loop.submit

    class Interrupted:
        """A future whose waiter gets ctrl-C once the coroutine runs."""

        def __init__(self, coroutine: object) -> None:
            self.future: Future[None] = submit(coroutine)  # type: ignore[arg-type]

        def result(self) -> None:
            assert started.wait(60)
            raise KeyboardInterrupt

        def cancel(self) -> None:
            self.future.cancel()

    monkeypatch.setattr(loop, "submit", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(long())
    assert ended.wait(60)
    loop.close()


def test_a_coroutine_that_blocks_the_loop_is_left_alone(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "CLOSE_DEADLINE", 0.05)
    monkeypatch.setattr(event_loop, "GRACE", 0.05)
    blocked, release = threading.Event(), threading.Event()

    async def blocks() -> None:
        blocked.set()
        release.wait(60)

    loop.submit(blocks())
    assert blocked.wait(60)
    loop.close()
    release.set()
    assert "did not end within" in caplog.text
    assert loop._thread is not None
    loop._thread.join(60)


def test_nothing_runs_after_close(loop: LoopThread) -> None:
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        loop.run(asyncio.sleep(0))
