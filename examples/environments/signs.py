"""An environment: a walk of four crossings with a sign at each, which says the way; the row has the signs."""

from __future__ import annotations

from slime_core import Sample, Step

WAYS = {"^": "n", ">": "e", "v": "s", "<": "w"}
"""What a sign shows -> the move that it asks for."""


class Environment:
    """One walk. Its state is one number, so an interrupted sample goes on from a snapshot."""

    def __init__(self, args: object) -> None:
        self.signs, self.passed = "", 0

    def reset(self, sample: Sample) -> str:
        """The signs of the walk are in the row: metadata {"signs": "^>v<"}. Shows the first."""
        self.signs, self.passed = str(sample.metadata["signs"]), 0
        return self.signs[0]

    def step(self, action: str) -> Step:
        """Pass a crossing; the reward is its share of the walk where the move was the sign's."""
        followed = action.strip() == WAYS[self.signs[self.passed]]
        self.passed += 1
        done = self.passed == len(self.signs)
        return Step("" if done else self.signs[self.passed], reward=followed / len(self.signs), done=done)

    def close(self) -> None:
        """Nothing is held."""

    def snapshot(self) -> int:
        """Crossings passed."""
        return self.passed

    def restore(self, sample: Sample, state: int) -> None:
        """Go on behind them."""
        self.signs, self.passed = str(sample.metadata["signs"]), state
