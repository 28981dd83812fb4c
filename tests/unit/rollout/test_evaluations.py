"""Evaluations that are interrupted, or take too long."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from slime_runs.board import start_board, stop_board

from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.rollout.deadlines import Interruptible, evaluated
from slime_core.waits import current


async def hang(begun: asyncio.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


async def test_an_interrupt_ends_what_runs_and_what_comes(recwarn: pytest.WarningsRecorder) -> None:
    before = set(current())  # what the garbage collector has not yet ended of other tests
    evaluations, begun = Interruptible(), asyncio.Event()
    running = asyncio.create_task(evaluated(evaluations, hang(begun), "evaluation", None))
    await begun.wait()
    evaluations.interrupt()
    with pytest.raises(RolloutInterrupted) as interrupted:
        await running
    assert not interrupted.value.drew
    again = asyncio.Event()
    with pytest.raises(RolloutInterrupted):
        await evaluated(evaluations, hang(again), "evaluation", None)
    assert not again.is_set()
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]
    assert set(current()) <= before


async def test_the_deadline_stops_the_run_with_a_report(tmp_path: Path) -> None:
    start_board(tmp_path, "test")
    try:
        with pytest.raises(RolloutError, match=r"evaluation at rollout 3: .*0\.02 s.*--eval-timeout.*stalls"):
            await evaluated(Interruptible(), hang(asyncio.Event()), "evaluation at rollout 3", 0.02)
    finally:
        stop_board()
    (report,) = (tmp_path / "stalls").iterdir()
    assert "evaluation at rollout 3 (deadline 0.02 s" in report.read_text()
