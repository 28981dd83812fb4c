"""The engine in a process of its own; the rollout stage uses it through `engine_proxy` in the rollout actor.

The actor is asynchronous: its methods and the engine share one event loop, so requests run concurrently. An engine with
`notify` steps only when the proxy allows it, as it does inline when every live sample waits: `advance` adds the waiting
requests and lets the engine step until a request ends. Ray does not keep the order of calls or of results, and the
order of the stage's events depends on both. So calls are numbered (`turns`), and results are numbered in the order in
which the engine finished them.

Calls of an asynchronous actor begin in the order in which they were made, which Ray does not promise.

    proxy    submit("in_turn", life, 0, "advance", ...)      submit("in_turn", life, 1, "submit", ...)
    actor    `CallOrder.come(number)` -> the call, up to its first wait -> `CallOrder.begun()` -> the next number

`engine_proxy` counts, `EngineActor.in_turn` takes. Calls begin one after the other and then run side by side; a number
that never comes holds up those behind it, until their deadline.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from slime_core.errors import EngineError
from slime_core.rollout.stage import deliver
from slime_core.sample import GenerationOutput
from slime_core.waits import gave_up, waiting
from slime_launcher_ray.receiver import Streams
from slime_launcher_ray.shell import Shell
from slime_launcher_ray.wait import EngineGone, as_known

Request: TypeAlias = tuple[int, list[int], Mapping[str, Any], Mapping[str, Any]]
"""Number, prompt ids, sampling parameters, and keyword arguments of the engine's `generate`: `rid`, `session_id`, and
with images `image_data`, which not every engine accepts."""
Finished: TypeAlias = list[tuple[int, int, GenerationOutput | EngineError]]
"""(Place in the order of finishing, counted from the start of the engine; the request's number; its result)."""


UPDATE = "update_weights_from_"
"""Prefix of the engine's update methods, followed by the name of a transport."""


class EngineActor(Shell):
    """The actor that holds the engine of the run's settings."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._engine: Any = None
        self._may_step = False
        self._finished: Finished = []
        self._places = itertools.count()
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._patience = self.order.settings.args.distributed_timeout_minutes * 60.0
        self._streams = Streams(self._patience)
        self._turns = CallOrder(self._patience)
        self._life: int | None = None

    async def start(self, life: int) -> tuple[str, ...]:
        """Start the engine and return its weight transports; `life` is the caller's count of starts."""
        self._life, self._turns, self._places = life, CallOrder(self._patience), itertools.count()
        self._engine = self.prepared.parts.engine(self.prepared.args)
        try:
            await self._engine.start()
        except Exception as error:
            raise as_known(error) from error
        return tuple(self._engine.weight_transports)

    async def stop(self) -> None:
        """Abort running requests and free the engine; safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()

    async def in_turn(self, life: int, number: int, method: str, *args: Any) -> Any:
        """Run a call of the proxy after all earlier calls have begun.

        Raises:
            EngineGone: The call was for an earlier start of the engine.
        """
        if life != self._life:
            raise EngineGone("the engine has been started again since it was called")
        turns = self._turns
        await turns.come(number)
        call = asyncio.ensure_future(getattr(self, method)(*args))
        await asyncio.sleep(0)  # let the call run to its first wait
        turns.begun()
        return await call

    @property
    def _started(self) -> Any:
        """The engine. Raises EngineGone in a process that Ray has restarted."""
        if self._engine is None:
            raise EngineGone("the engine has not been started")
        return self._engine

    # -- generating ----------------------------------------------------------------------------------------

    async def generate(
        self, input_ids: Sequence[int], params: Mapping[str, Any], named: Mapping[str, Any]
    ) -> GenerationOutput:
        """Call the engine's `generate` for a request that may step at once."""
        try:
            output: GenerationOutput = await self._engine.generate(input_ids, params, **named)
        except Exception as error:
            raise as_known(error) from error
        return output

    async def submit(self, requests: list[Request]) -> None:
        """Add requests without a step; from the first call on, the engine steps only in `advance`."""
        self._engine.may_step = self._allowed
        for request in requests:
            task = asyncio.create_task(self._one(*request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.sleep(0)  # now every request has reached the engine

    async def advance(self, requests: list[Request]) -> Finished:
        """Add requests, step until at least one request ends, and return the finished requests."""
        await self.submit(requests)
        self._may_step = True
        try:
            while not self._finished:
                self._news.clear()
                self._engine.notify()
                await self._news.wait()
        finally:
            self._may_step = False
        return self.take()

    def _allowed(self) -> bool:
        return self._may_step and not self._finished

    async def _one(
        self, number: int, input_ids: list[int], params: Mapping[str, Any], named: Mapping[str, Any]
    ) -> None:
        result: GenerationOutput | EngineError
        try:
            result = await self._engine.generate(input_ids, params, **named)
        except EngineError as error:
            result = error
        except Exception as error:
            result = EngineError(f"{type(error).__name__}: {error}")
        # No await between the engine's result and this line, so the engine makes no step before `advance` sees it.
        self._finished.append((next(self._places), number, result))
        self._news.set()

    def take(self) -> Finished:
        """Return the finished requests that were not returned before."""
        finished, self._finished = self._finished, []
        return finished

    async def control(self, method: str, *args: Any) -> tuple[Any, Finished]:
        """Call another method of the engine; return its result and the requests that it ended."""
        try:
            result = await getattr(self._engine, method)(*args)
        except Exception as error:
            raise as_known(error) from error
        await asyncio.sleep(0)  # let the tasks of requests that this call ended finish
        return result, self.take()

    # -- weights -------------------------------------------------------------------------------------------

    async def open_stream(self, number: str) -> None:
        """Open a stream of weights."""
        self._streams.open(number, "the rollout actor")

    async def bucket(self, number: str, what: Any) -> None:
        """Add weights to a stream; runs in an event loop of its own, since the engine's loop is busy loading."""
        self._streams.put(number, what)

    async def take_weights(self, number: str, method: str, *rest: Any) -> Any:
        """Call the engine's update method with the pairs of a stream."""
        call = self._method(method)
        try:
            return await call(self._streams.take(number), *rest)
        except Exception as error:
            raise as_known(error) from error
        finally:
            self._streams.close(number)

    async def update_from(self, method: str, payload: Any, version: int) -> Any:
        """Call the engine's update method with a payload that is not tensors, such as a directory."""
        call = self._method(method)
        try:
            return await call(payload, version)
        except Exception as error:
            raise as_known(error) from error

    def _method(self, name: str) -> Callable[..., Any]:
        """Return a method of the engine; for an update, the engine's method or the transport's `deliver`."""
        if not name.startswith(UPDATE):
            method: Callable[..., Any] = getattr(self._started, name)
            return method
        return partial(deliver, self.prepared.args, self._started, name.removeprefix(UPDATE))

    def compares_weights(self) -> bool:
        """Return whether the engine has `differing_weights`."""
        return hasattr(self._engine, "differing_weights")


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
