"""How a stage runs rollout functions: plain ones beside its event loop where they may post to the engine."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from slime_core.config import Args
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
