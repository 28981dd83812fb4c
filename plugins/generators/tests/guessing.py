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


class Chatting(Guess):
    """Observations are chat messages."""

    def step(self, action: str) -> Step:
        step = super().step(action)
        return Step([{"role": "tool", "content": str(step.observation)}], step.reward, step.done, step.info)


class Corridor:
    """Two steps to the right lead out; `reset` and `step` only, with a named state."""

    def __init__(self) -> None:
        self.at = 0

    def reset(self) -> Step:
        return Step("you are at 0", state="0")

    def step(self, action: str) -> Step:
        self.at = max(0, self.at + (1 if "right" in action else -1))
        done = self.at == 2
        parts = {"exit": 1.0, "style": 0.25} if done else {}
        return Step(f"you are at {self.at}", sum(parts.values()), done, components=parts, state=str(self.at))


class Gym:
    """The same in gymnasium's form, with parts of the reward as a mapping."""

    def __init__(self, length: int = 2) -> None:
        self.at, self.length, self.seed = 0, length, -1

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, int]]:
        assert seed == 0
        return "you are at 0", {"length": self.length}

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, int]]:
        self.at = max(0, self.at + (1 if "right" in action else -1))
        done = self.at == self.length
        reward = {"exit": 1.0, "style": 0.25} if done else 0.0
        return f"you are at {self.at}", reward, done, False, {"at": self.at}


class Two:
    """Its step forgets whether it is done."""

    answer: ClassVar[Any] = ("seen", 1.0)

    def reset(self) -> str:
        return "look"

    def step(self, action: str) -> Any:
        return self.answer


class Nan(Two):
    """Its reward is not a number."""

    answer: ClassVar[Any] = ("seen", float("nan"), True)


class Word(Two):
    """A part of its reward is a word."""

    answer: ClassVar[Any] = ("seen", {"style": "good"}, True)
