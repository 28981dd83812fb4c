"""Calls with deadlines: what goes wrong is text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from slime_generators.tool_use import ToolResult, call_tool, running

from slime_core.tools import Tool

RELEASE = threading.Event()


@pytest.fixture(autouse=True)
def nothing_hangs_on() -> Iterator[None]:
    """Calls that overran are counted until they return, which would be in the middle of the next test."""
    before = set(threading.enumerate())
    RELEASE.clear()
    yield
    RELEASE.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)


def double(x: int) -> int:
    return 2 * x


async def later(x: int) -> dict[str, int]:
    await asyncio.sleep(0)
    return {"x": x}


def broken() -> str:
    raise KeyError("no\nsuch city")


def leaves() -> str:
    raise SystemExit(3)


def surrogate() -> str:
    return "\ud800"


def hang() -> str:
    RELEASE.wait(60)
    return "late"


async def hang_softly() -> str:
    await asyncio.Event().wait()
    return ""


def mine(*, sample: Any, args: Any) -> str:
    return f"{sample}{args}"


def call(function: Any, deadline: float = 30.0, **arguments: Any) -> ToolResult:
    return asyncio.run(call_tool(Tool.of(function), arguments, deadline=deadline, args="A", sample="S"))


@pytest.mark.parametrize(
    ("function", "arguments", "text", "failed"),
    [
        (double, {"x": 4}, "8", False),
        (later, {"x": 4}, '{"x": 4}', False),
        (broken, {}, "error: KeyError: 'no\\nsuch city'", True),
        (leaves, {}, "error: RuntimeError: SystemExit: 3", True),
        (surrogate, {}, "?", False),
        (mine, {}, "SA", False),
    ],
)
def test_results_and_errors_are_text(function: Any, arguments: dict[str, Any], text: str, failed: bool) -> None:
    result = call(function, **arguments)
    assert (result.text, result.failed) == (text, failed)
    assert result.seconds >= 0


@pytest.mark.parametrize("function", [hang, hang_softly])
def test_a_deadline_ends_the_wait(function: Any) -> None:
    result = call(function, deadline=0.05)
    assert (result.text, result.failed) == (f"error: {function.__name__} did not answer within 0.05 s", True)


def test_calls_that_hang_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_LEFT_BEHIND", running._Overdue.count + 2)

    async def many() -> list[ToolResult]:
        return [await call_tool(Tool.of(hang), {}, deadline=0.02) for _ in range(3)]

    texts = [result.text for result in asyncio.run(many())]
    assert [("did not answer" in text, "no other is started" in text) for text in texts] == [
        (True, False),
        (True, False),
        (False, True),
    ]


def test_plain_functions_run_at_the_same_time() -> None:
    meet = threading.Barrier(3)

    def together() -> str:
        meet.wait(30)
        return "met"

    async def three() -> list[ToolResult]:
        return await asyncio.gather(*(call_tool(Tool.of(together), {}, deadline=60) for _ in range(3)))

    assert [result.text for result in asyncio.run(three())] == ["met"] * 3
