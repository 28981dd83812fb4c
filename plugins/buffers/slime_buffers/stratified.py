"""Draw from every source (`metadata["source_name"]`) in equal or given shares.

Uses stride scheduling (Waldspurger and Weihl, 1995) for the waiting groups and for the fresh prompts. Each source has a
clock that advances by 1 / share with every group drawn from it, and the source whose clock is furthest behind is next.
A source that returns after a pause starts at the current time of the others, so it cannot block them. Nothing is drawn
at random.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from slime_core import Args, BufferBase, Group, PluginOptions, Sample, options


class Options(PluginOptions):
    """Shares of the sources, and how far the shares may change the order of the data."""

    shares: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Weight of each source, {name: weight}; sources that are not named have weight 1."""
    look_ahead: int = Field(default=64, ge=0)
    """Maximum number of prompts in a row to pass over because their source is ahead of its share; 0: none."""
    max_passes: int = Field(default=8, ge=1)
    """Maximum number of times in a row that a prompt is passed over; it is used the next time."""


class Buffer(BufferBase):
    """A buffer with a queue per source. Groups without a source share a queue, named "" in `shares`."""

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
        """Number of waiting groups."""
        return sum(map(len, self._queues.values()))

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """Read the shares again, which may change between rollouts."""
        super().begin_rollout(rollout_id, weight_version)
        self._options = options(self.args, "stratified", Options)

    def add(self, groups: list[Group]) -> None:
        """Append each group to the queue of its source."""
        for group in groups:
            name = _source(group[0])
            queue = self._queues.setdefault(name, deque())
            if not queue:
                self._join(name)
            queue.append(group)

    def take(self, num_groups: int) -> list[Group]:
        """Take groups, each from the source that is furthest behind; ties are broken by name."""
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
        """Return false if the prompt's source is a turn ahead of another one, within `look_ahead` and `max_passes`."""
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
        """Return the number of prompts passed over since the last call."""
        passed, self._num_passed = self._num_passed, 0
        return {"rollout/stratified/passed_prompts": float(passed)}

    def state_dict(self) -> dict[str, Any]:
        """Return queues, clocks and the counts of prompts passed over."""
        return {
            "groups": self.pack(group for name in sorted(self._queues) for group in self._queues[name]),
            "clocks": dict(sorted(self._clocks.items())),
            "now": self._now,
            "passed": sorted([row, times] for row, times in self._passed.items()),
            "in_a_row": self._in_a_row,
            "num_passed": self._num_passed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
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
        """Start a source's clock or set it to the current time; with `keep`, do not change a running clock."""
        if name not in self._clocks or not keep:
            self._clocks[name] = max(self._clocks.get(name, 0.0), self._now)

    def _advance(self, name: str) -> None:
        self._now = max(self._now, self._clocks[name])
        self._clocks[name] += 1 / self._share(name)


def _source(sample: Sample) -> str:
    return str(sample.metadata.get("source_name") or "")
