"""Run the calls of a turn and return their results in the order of the text; count per tool in the sample's metadata.

Nothing here fails the sample. A call that cannot be parsed, names an unknown tool, has wrong arguments, raises or takes
too long gets the result `error: ...`, to which the model may react.
"""

from __future__ import annotations

import asyncio

from slime_core import Args, Sample
from slime_core.tools import IllFormedCall, ParsedTurn, ToolCall, call_problem
from slime_generators.tool_use.running import ToolResult, call_tool, error_text
from slime_generators.tool_use.settings import Settings

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
