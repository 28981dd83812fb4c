"""Tests of deadlines in an event loop whose time does not pass by itself.

A deadline of 30 ms in real time is also met by a machine that stops for 30 ms. Here time stands still while anything
is ready, so that only what the test makes late is late.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Coroutine, MutableSequence
from typing import Any

from tests.simulation.loop import SimulatedLoop


class _InOrder(random.Random):
    """Tasks take their turns as asyncio gives them."""

    def shuffle(self, x: MutableSequence[Any]) -> None:
        pass


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorator: run an `async def` test in a `SimulatedLoop`. For what needs no sockets, processes and threads."""

    @functools.wraps(test)
    def run(*args: Any, **keywords: Any) -> None:
        loop = SimulatedLoop(_InOrder(0))
        try:
            loop.run(test(*args, **keywords))
        finally:
            loop.discard()

    return run
