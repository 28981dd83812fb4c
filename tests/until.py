"""Waiting for what another task, thread or process does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 60.0


async def until(condition: Callable[[], object], what: str = "a condition") -> None:
    """Wait until it is true."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE_S:.0f} s for {what}"
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], T], what: str = "a condition", seconds: float = DEADLINE_S) -> T:
    """`until` where no event loop runs: what the condition became."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)
    return found
