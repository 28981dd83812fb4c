"""Waiting for what another task, thread or process does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 60.0


async def until(condition: Callable[[], object], what: str = "a condition") -> None:
    """Wait until it is true."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE_S:.0f} s for {what}"
        await asyncio.sleep(0.005)
