"""The base class of buffers: which waiting groups come next, which fresh prompts are used, what is kept for reuse.

Plugins of the kind `buffers` subclass `BufferBase` and override what they change; the data source owns one and calls
it. THUDM/slime's buffer filters, plain functions, are the short form for choosing among waiting groups. A buffer is
state of the run. Everything that decides its next answer, random draws included, must be in `state_dict`, or a resumed
run draws other groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.sample.sample import Group, Sample

if TYPE_CHECKING:
    from slime_core.protocols import Args


class BufferBase:
    """Groups that were given back, oldest first; every fresh prompt is used and nothing is kept for reuse."""

    replays: bool | int = False
    """How often a group may be trained on again because this buffer gives it out once more; True: without limit.
    `slime ledger verify` checks the run against it."""
    drops: bool = False
    """True if the buffer may discard a group that was given back (too old, no room)."""

    stored_as: str = ""
    """Name of the class in checkpoints; empty: its module and name."""
    num_dropped: int = 0
    """Groups that a filter function removed without returning them, over the run."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.rollout_id: int | None = None
        """The rollout that draws; None if unknown."""
        self.weight_version = 0
        """The newest weight version when that rollout began."""
        self._waiting: deque[Group] = deque()

    def __len__(self) -> int:
        """Return the number of waiting groups."""
        return len(self._waiting)

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """Note that a rollout is about to draw."""
        self.rollout_id, self.weight_version = rollout_id, weight_version

    def add(self, groups: list[Group]) -> None:
        """Take groups that a rollout gives back: partial, finished in excess, or to be regenerated."""
        self._waiting.extend(groups)

    def take(self, num_groups: int) -> list[Group]:
        """Remove and return up to `num_groups` groups; fresh prompts make up for the rest."""
        return [self._waiting.popleft() for _ in range(min(num_groups, len(self._waiting)))]

    def wants(self, prompt: Sample) -> bool:
        """Return whether the next prompt of the data set is used now; a refused one comes up again in the next epoch.

        `prompt.row` is its identity, the same in every epoch. After a whole epoch of refusals in a row the source
        uses the next prompt all the same.
        """
        return True

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Look at scored groups: the groups of a rollout for training, or a group that its dynamic filter dropped.

        The run still uses the groups: copy those that you keep.
        """

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, under their full names."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as JSON values; it is part of the checkpoint."""
        return {"groups": self.pack(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._waiting = deque(self.unpack(state["groups"]))

    @staticmethod
    def pack(groups: Iterable[Group]) -> list[list[dict[str, Any]]]:
        """Return groups as JSON values."""
        return [[sample.to_dict() for sample in group] for group in groups]

    @staticmethod
    def unpack(state: Iterable[Sequence[Mapping[str, Any]]]) -> list[Group]:
        """Return the groups of the result of `pack`."""
        return [[Sample.from_dict(data) for data in group] for group in state]
