"""An event loop in a thread of its own, used by several threads at once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from slime_core.rollout import event_loop
from slime_core.rollout.event_loop import LoopThread


@pytest.fixture
def loop() -> LoopThread:
    return LoopThread()


def test_two_threads_take_turns_in_one_loop(loop: LoopThread) -> None:
    """Each waits for the other, so neither would end if the second had to wait for the end of the first."""
    here, there = asyncio.Event(), asyncio.Event()

    async def first() -> int:
        here.set()
        await there.wait()
        return threading.get_ident()

    async def second() -> int:
        there.set()
        await here.wait()
        return threading.get_ident()

    answers: list[int] = []
    other = threading.Thread(target=lambda: answers.append(loop.run(first())), daemon=True)
    other.start()
    answers.append(loop.run(asyncio.wait_for(second(), 60)))
    other.join(60)
    loop.close()
    assert len(answers) == 2
    assert len(set(answers)) == 1
    assert answers[0] != threading.get_ident()


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
