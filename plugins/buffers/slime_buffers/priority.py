"""Takes the groups with the highest priority first.

    priority = reward * (mean reward of the group) + staleness * (newest weight version - the group's oldest one)

The newest version is the same for all that wait, so it drops out of the order and a heap holds the groups: adding and
taking one of n costs O(log n). Groups without a reward count as 0, groups that were never generated as up to date.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from slime_core import Args, BufferBase, Group, PluginOptions, SampleStatus, execution_rewards, options


class Options(PluginOptions):
    """Weights of the two terms, and where partial groups go."""

    reward: float = Field(default=0.0, allow_inf_nan=False)
    """Weight of the group's mean reward, fan-out siblings counting once; negative puts low rewards first."""
    component: str | None = None
    """Part of the reward (`Sample.reward_components`) that counts in place of the reward."""
    staleness: float = Field(default=1.0, allow_inf_nan=False)
    """Weight of the group's age in weight versions; negative puts the freshest first."""
    partial: Literal["first", "last", "any"] = "first"
    """Groups that were interrupted half-way: before all others, after them, or by their priority."""


class Buffer(BufferBase):
    """A heap; of equal priority the group that came first."""

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self._options = options(args, "priority", Options)
        self._heap: list[tuple[int, float, int, Group]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self._heap)

    def add(self, groups: list[Group]) -> None:
        """Weigh and keep."""
        for group in groups:
            heapq.heappush(self._heap, (self._rank(group), -self._priority(group), self._arrivals, group))
            self._arrivals += 1

    def take(self, num_groups: int) -> list[Group]:
        """The highest priorities, in that order."""
        return [heapq.heappop(self._heap)[3] for _ in range(min(num_groups, len(self._heap)))]

    def state_dict(self) -> dict[str, Any]:
        """Groups in order, with the keys that order them."""
        entries = sorted(self._heap)
        return {
            "groups": self.pack(group for *_, group in entries),
            "keys": [list(key) for *key, _ in entries],
            "arrivals": self._arrivals,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; a sorted list is a heap."""
        groups = self.unpack(state["groups"])
        self._heap = [(rank, key, n, group) for (rank, key, n), group in zip(state["keys"], groups)]
        self._arrivals = int(state["arrivals"])

    def _rank(self, group: Group) -> int:
        partial = any(s.response_length and s.status in (SampleStatus.ABORTED, SampleStatus.PENDING) for s in group)
        return {"any": 0, "first": 0 if partial else 1, "last": 1 if partial else 0}[self._options.partial]

    def _priority(self, group: Group) -> float:
        rewards = execution_rewards(self.args, group, self._options.component)
        mean = statistics.fmean(rewards) if rewards else 0.0
        versions = [v for s in group for v in s.token_weight_versions if v >= 0]
        oldest = min(versions, default=self.weight_version)
        return self._options.reward * mean - self._options.staleness * oldest
