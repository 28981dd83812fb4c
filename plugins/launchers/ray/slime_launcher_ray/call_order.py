"""Calls of an asynchronous actor begin in the order in which they were made, which Ray does not promise.

    proxy    submit("in_turn", life, 0, "advance", ...)      submit("in_turn", life, 1, "submit", ...)
    actor    `CallOrder.come(number)` -> the call, up to its first wait -> `CallOrder.begun()` -> the next number

`engine_proxy` counts, `EngineActor.in_turn` takes. Calls begin one after the other and then run side by side; a number
that never comes holds up those behind it, until their deadline.
"""

from __future__ import annotations

import asyncio

from slime_core.errors import EngineError
from slime_core.waits import gave_up, waiting


class CallOrder:
    """The numbers 0, 1, 2, ... of one caller; all methods in one event loop.

    Args:
        patience: Seconds that a call waits for those before it.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._next = 0
        self._early: dict[int, asyncio.Future[None]] = {}

    async def come(self, number: int) -> None:
        """Return when all calls before this one have begun. Raises EngineError when one of them does not come."""
        if number == self._next:
            return
        turn = self._early[number] = asyncio.get_running_loop().create_future()
        what = f"the calls before call {number} of the rollout actor"
        try:
            with waiting(what, deadline=self._patience, then="the call fails"):
                await asyncio.wait_for(turn, self._patience)
        except TimeoutError:
            del self._early[number]
            note = gave_up(what, self._patience, "the call fails")
            raise EngineError(f"call {self._next} of the rollout actor did not come: {note}") from None

    def begun(self) -> None:
        """The call whose turn it was has begun."""
        self._next += 1
        turn = self._early.pop(self._next, None)
        if turn is not None and not turn.done():
            turn.set_result(None)
