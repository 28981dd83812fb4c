"""Tools, an environment and a parser for the test under load: some calls are slow, some fail, some never end."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from typing import Any

from slime_core import Sample, Step
from slime_core.tools import ParsedTurn, ToolCall

RELEASE = threading.Event()
"""Lets the plain functions go that hang."""
FATES: Counter[str] = Counter()
"""How many calls had which."""


def fate(*key: Any) -> str:
    """1% of all calls each are slow, fail and hang."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    found = {0: "slow", 1: "fails", 2: "hangs"}.get(int.from_bytes(digest, "big") % 100, "answers")
    FATES[found] += 1
    return found


async def _act(what: str) -> None:
    if what == "slow":
        await asyncio.sleep(0.2)
    elif what == "fails":
        raise ConnectionError("the service is down")
    elif what == "hangs":
        await asyncio.Event().wait()
    else:
        await asyncio.sleep(0.001)


async def lookup(key: str, *, sample: Sample) -> str:
    """Look something up.

    Args:
        key: What.
    """
    await _act(fate("lookup", sample.index, sample.response_length))
    return f"[{key}]"


def blocking(key: str, *, sample: Sample) -> str:
    """Look something up, in a thread.

    Args:
        key: What.
    """
    what = fate("blocking", sample.index, sample.response_length)
    if what == "fails":
        raise ConnectionError("the service is down")
    if what == "hangs":
        RELEASE.wait(600)
    return f"[{key}]"


class EveryTurn:
    """Reads every turn as two calls, so that a random model has tools."""

    def parse(self, text: str, tools: Any = (), *, reasoning_open: bool = False) -> ParsedTurn:
        """A call of each tool."""
        key = text[-3:]
        return ParsedTurn(text, attempts=tuple(ToolCall("", name, {"key": key}) for name in ("lookup", "blocking")))

    def render(self, calls: Any) -> str:
        """As it would have been written."""
        return "".join(call.name for call in calls)

    def claims(self, chat_template: str) -> bool:
        """Only by name."""
        return False


class Room:
    """Three steps, any of which may be slow, fail or hang."""

    def __init__(self, args: Any) -> None:
        self.steps = 0

    async def reset(self, sample: Sample) -> None:
        """Nothing to see."""
        self.index = sample.index

    async def step(self, action: str) -> Step:
        """Go on."""
        self.steps += 1
        await _act(fate("step", self.index, self.steps))
        return Step(f"step {self.steps}", 0.1, self.steps == 3)

    async def close(self) -> None:
        """Nothing is held."""
