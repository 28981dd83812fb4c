"""Environments that the tests play."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

from slime_core import Sample, Step, Turn

CLOSED: list[str] = []
"""Names of environments that were closed, in order."""
LIVE: set[int] = set()
MOST = [0]
"""How many `Guess` there were at once."""
HANG, HANGS = threading.Event(), threading.Event()
"""Set by a test when hanging steps may return; set by the step that hangs."""


class Guess:
    """Guess the label; "higher" or "lower" otherwise. Plain methods, so it runs in a thread."""

    def __init__(self, args: Any) -> None:
        self.number = self.guesses = 0
        LIVE.add(id(self))
        MOST[0] = max(MOST[0], len(LIVE))

    def reset(self, sample: Sample) -> str | None:
        self.number = int(sample.label)
        return sample.metadata.get("first")

    def step(self, action: str) -> Step:
        self.guesses += 1
        guess = int("".join(c for c in action if c.isdigit()) or 0)
        if guess == self.number:
            return Step(reward=1.0, done=True, info={"guesses": self.guesses})
        return Step("higher" if guess < self.number else "lower", reward=-0.125)

    def close(self) -> None:
        LIVE.discard(id(self))
        CLOSED.append(type(self).__name__)


class Remembering(Guess):
    """The same, and can be put back."""

    def snapshot(self) -> list[int]:
        return [self.number, self.guesses]

    def restore(self, sample: Sample, state: list[int]) -> None:
        self.number, self.guesses = state

    def score(self, sample: Sample) -> dict[str, float]:
        return {"score": 1.0 / self.guesses, "guesses": float(self.guesses)}


class Once:
    """Done after the first action; coroutines."""

    def __init__(self, args: Any) -> None:
        self.turns: list[Turn] = []

    async def reset(self, sample: Sample) -> None:
        return None

    async def step(self, action: str, turn: Turn) -> Step:
        self.turns.append(turn)
        return Step(reward=0.5, done=True, info={"raw": turn.raw, "finish": turn.finish_reason, "action": action})

    async def close(self) -> None:
        CLOSED.append("Once")


class Hanging(Guess):
    """Its second step hangs until `HANG`."""

    def step(self, action: str) -> Step:
        if self.guesses:
            HANGS.set()
            HANG.wait(60)
        return super().step(action)


class HangingProcess(Guess):
    """Its second step never returns; in a process of its own."""

    execution: ClassVar[str] = "process"

    def step(self, action: str) -> Step:
        if self.guesses:
            time.sleep(600)
        return super().step(action)


class Raising(Guess):
    """Its step raises."""

    def step(self, action: str) -> Step:
        raise RuntimeError("the world is broken")


class Closing(Guess):
    """Its close raises."""

    def close(self) -> None:
        raise RuntimeError("cannot close")


class Chatting(Guess):
    """Observations are chat messages."""

    def step(self, action: str) -> Step:
        step = super().step(action)
        return Step([{"role": "tool", "content": str(step.observation)}], step.reward, step.done, step.info)
