"""An environment: a walk over four crossings with a sign at each that shows the way; the row has the signs."""

from __future__ import annotations

from slime_core import Sample, Step

WAYS = {"^": "n", ">": "e", "v": "s", "<": "w"}
"""Sign -> required move."""


class Environment:
    """A walk. Its state is one number, so an interrupted sample resumes from a snapshot."""

    def __init__(self, args: object) -> None:
        self.signs, self.passed = "", 0

    def reset(self, sample: Sample) -> str:
        """Read the signs of the walk from the row, metadata {"signs": "^>v<"}; return the first sign."""
        self.signs, self.passed = str(sample.metadata["signs"]), 0
        return self.signs[0]

    def step(self, action: str) -> Step:
        """Pass a crossing; the reward is its share of the walk if the move follows the sign."""
        followed = action.strip() == WAYS[self.signs[self.passed]]
        self.passed += 1
        done = self.passed == len(self.signs)
        return Step("" if done else self.signs[self.passed], reward=followed / len(self.signs), done=done)

    def close(self) -> None:
        """Do nothing; the environment has no resources."""

    def snapshot(self) -> int:
        """Return the number of crossings passed."""
        return self.passed

    def restore(self, sample: Sample, state: int) -> None:
        """Continue after the crossings passed."""
        self.signs, self.passed = str(sample.metadata["signs"]), state
