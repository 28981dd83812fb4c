"""Draws from every source (`metadata["source_name"]`) in equal or given shares.

Stride scheduling (Waldspurger and Weihl, 1995) over the waiting groups and over the fresh prompts: each source has a
clock that goes on by 1 / share with every group drawn of it, and the source whose clock is furthest behind is next.
A source that comes up anew starts at the others' time, so none is ever locked out by one that was away. Nothing is
drawn at random.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from slime_core import Args, BufferBase, Group, PluginOptions, Sample, options


class Options(PluginOptions):
    """Shares, and how far they may bend the order of the data."""

    shares: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Weight of each source, {name: weight}; sources that are not named have weight 1."""
    look_ahead: int = Field(default=64, ge=0)
    """So many prompts of sources that are ahead of their share are passed over at most to find another; 0: none."""
    max_passes: int = Field(default=8, ge=1)
    """A prompt that was passed over so many times in a row is used the next time."""


class Buffer(BufferBase):
    """One queue per source; groups without a source share one, called "" in `shares`."""

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self._options = options(args, "stratified", Options)
        self._queues: dict[str, deque[Group]] = {}
        self._clocks: dict[str, float] = {}
        self._now = 0.0
        self._passed: dict[int, int] = {}
        self._in_a_row = 0
        self._num_passed = 0

    def __len__(self) -> int:
        """Groups that wait."""
        return sum(map(len, self._queues.values()))

    def add(self, groups: list[Group]) -> None:
        """Queue each behind its source."""
        for group in groups:
            name = _source(group[0])
            queue = self._queues.setdefault(name, deque())
            if not queue:
                self._join(name)
            queue.append(group)

    def take(self, num_groups: int) -> list[Group]:
        """Source by source, the one that is furthest behind first; of equal ones by name."""
        taken: list[Group] = []
        while len(taken) < num_groups:
            waiting = [name for name, queue in self._queues.items() if queue]
            if not waiting:
                break
            name = min(waiting, key=lambda n: (self._clocks[n], n))
            taken.append(self._queues[name].popleft())
            self._advance(name)
        return taken

    def wants(self, prompt: Sample) -> bool:
        """Not while its source is a turn ahead of another, within `look_ahead` and `max_passes`."""
        name = _source(prompt)
        self._join(name, keep=True)
        ahead = self._clocks[name] - min(self._clocks.values())
        passed = self._passed.get(prompt.row, 0) if prompt.row is not None else 0
        turn = 1 / self._share(name)
        if ahead >= turn and self._in_a_row < self._options.look_ahead and passed < self._options.max_passes:
            if prompt.row is not None:
                self._passed[prompt.row] = passed + 1
            self._in_a_row += 1
            self._num_passed += 1
            return False
        self._in_a_row = 0
        if prompt.row is not None:
            self._passed.pop(prompt.row, None)
        self._advance(name)
        return True

    def take_metrics(self) -> dict[str, float]:
        """Prompts passed over since the last call."""
        passed, self._num_passed = self._num_passed, 0
        return {"rollout/stratified/passed_prompts": float(passed)}

    def state_dict(self) -> dict[str, Any]:
        """Queues, clocks and who was passed over."""
        return {
            "groups": self.pack(group for name in sorted(self._queues) for group in self._queues[name]),
            "clocks": dict(sorted(self._clocks.items())),
            "now": self._now,
            "passed": sorted([row, times] for row, times in self._passed.items()),
            "in_a_row": self._in_a_row,
            "num_passed": self._num_passed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._queues = {}
        for group in self.unpack(state["groups"]):
            self._queues.setdefault(_source(group[0]), deque()).append(group)
        self._clocks = dict(state["clocks"])
        self._now = float(state["now"])
        self._passed = dict(state["passed"])
        self._in_a_row, self._num_passed = int(state["in_a_row"]), int(state["num_passed"])

    def _share(self, name: str) -> float:
        return self._options.shares.get(name, 1.0)

    def _join(self, name: str, *, keep: bool = False) -> None:
        """Start a source's clock; one that was away goes on at the present, unless `keep` leaves a running one."""
        if name not in self._clocks or not keep:
            self._clocks[name] = max(self._clocks.get(name, 0.0), self._now)

    def _advance(self, name: str) -> None:
        self._now = max(self._now, self._clocks[name])
        self._clocks[name] += 1 / self._share(name)


def _source(sample: Sample) -> str:
    return str(sample.metadata.get("source_name") or "")
