"""Run a tool call with a deadline and return its result, or the error, as text for the model.

    coroutine functions    in the event loop                  at the deadline: cancelled
    plain functions        in a daemon thread of their own    at the deadline: the thread is left running

Generators run several calls at once. Exceptions of a tool are not raised: a failed call is an observation like any
other, and the model can react to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_tool_parsers import Tool, call_problem, json_text

from slime_core import Args, Sample
from slime_core.tools import IllFormedCall, ParsedTurn, ToolCall
from slime_core.waits import Overdue, by_deadline, loop_turn, waiting
from slime_generators.multi_turn import encodable
from slime_generators.tool_use.settings import Settings

if TYPE_CHECKING:
    from slime_core import Args


MAX_LEFT_BEHIND = 256
"""Maximum number of threads that run past their deadline; at this number, no further thread is started."""
_LONGEST_ERROR = 500
"""Maximum number of characters of an error text for the model."""


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool call."""

    text: str
    """Text for the model: the result, or `error: ...`."""
    failed: bool
    seconds: float


class _Overdue:
    """The number of threads that still run after their deadline."""

    count = 0
    lock = threading.Lock()


async def call_tool(
    tool: Tool, arguments: Mapping[str, Any], *, deadline: float | None, args: Args | None = None, sample: Any = None
) -> ToolResult:
    """Call the tool by name of argument.

    Args:
        tool: The tool to call.
        arguments: Checked against its schema already.
        deadline: Seconds; None waits as long as the tool takes.
        args: The run's settings, for tools that take `args`.
        sample: The sample, for tools that take `sample`.
    """
    given = {"args": args, "sample": sample}
    call = {**arguments, **{name: given[name] for name in tool.given}}
    started = time.monotonic()
    try:
        with waiting(f"tool {tool.name}", deadline=deadline, then="the call is answered with an error"):
            value = await by_deadline(_value(tool.function, call), deadline)
    except Exception as error:  # the tool's code: the model gets its exceptions as text
        overran = isinstance(error, Overdue)
        text = f"{tool.name} did not answer within {deadline:g} s" if overran else f"{type(error).__name__}: {error}"
        result = ToolResult(error_text(text), True, time.monotonic() - started)
    else:
        text = value if isinstance(value, str) else _as_text(value)
        result = ToolResult(encodable(text), False, time.monotonic() - started)
    await loop_turn()
    return result


def error_text(problem: str) -> str:
    """Return an error as text for the model, on one line."""
    text = encodable(" ".join(problem.split()))
    return f"error: {text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + '...'}"


async def _value(function: Callable[..., Any], call: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(**call)
    value = await _in_thread(lambda: function(**call))
    return await value if inspect.isawaitable(value) else value


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call that may block or never return."""
    if _Overdue.count >= MAX_LEFT_BEHIND:
        raise RuntimeError(f"{MAX_LEFT_BEHIND} calls that overran their deadlines still run; no other is started")
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    state = {"left": False, "ended": False}

    def run() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = call()
        except BaseException as error:  # any exception is passed to the caller
            failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        with _Overdue.lock:
            state["ended"] = True
            _Overdue.count -= state["left"]
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
            loop.call_soon_threadsafe(_settle, done, value, failure)

    threading.Thread(target=run, name="slime: tool", daemon=True).start()
    try:
        return await done
    except asyncio.CancelledError:
        with _Overdue.lock:
            state["left"] = not state["ended"]
            _Overdue.count += state["left"]
        raise


def _settle(done: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(value)


def _as_text(value: Any) -> str:
    try:
        return json_text(value)
    except (TypeError, ValueError, RecursionError):
        return str(value)


STATS = "tool_stats"
"""Key of the sample's metadata: {tool: {"calls", "errors", "seconds"}}."""
UNKNOWN, ILL_FORMED = "unknown", "ill_formed"
"""Names in the counts for calls of unknown tools, and for calls that cannot be parsed."""


async def answers(args: Args, sample: Sample, turn: ParsedTurn, settings: Settings) -> list[ToolResult]:
    """Run the calls of the turn concurrently and return one result per call."""
    called = turn.attempts[: settings.max_calls_per_turn]
    results = list(await asyncio.gather(*(_answered(args, sample, attempt, settings) for attempt in called)))
    dropped = len(turn.attempts) - len(called)
    text = error_text(f"not called: a turn may have {settings.max_calls_per_turn} calls")
    results += [ToolResult(text, True, 0.0)] * dropped
    for attempt, result in zip(turn.attempts, results):
        _count(sample, _name_of(attempt, settings), result)
    return results


async def _answered(args: Args, sample: Sample, attempt: ToolCall | IllFormedCall, settings: Settings) -> ToolResult:
    if isinstance(attempt, IllFormedCall):
        return ToolResult(error_text(f"the call cannot be read: {attempt.problem}"), True, 0.0)
    problem = call_problem(attempt, settings.schemas)
    if problem is not None or isinstance(attempt.arguments, str):
        return ToolResult(error_text(problem or "arguments must be named"), True, 0.0)
    tool = settings.tools[attempt.name]
    return await call_tool(tool, attempt.arguments, deadline=settings.tool_timeout, args=args, sample=sample)


def _name_of(attempt: ToolCall | IllFormedCall, settings: Settings) -> str:
    if isinstance(attempt, IllFormedCall):
        return ILL_FORMED
    return attempt.name if attempt.name in settings.tools else UNKNOWN


def _count(sample: Sample, name: str, result: ToolResult) -> None:
    stats = sample.metadata.setdefault(STATS, {}).setdefault(name, {"calls": 0, "errors": 0, "seconds": 0.0})
    stats["calls"] += 1
    stats["errors"] += int(result.failed)
    stats["seconds"] += result.seconds
