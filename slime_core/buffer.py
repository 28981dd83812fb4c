"""The base class of buffers: which waiting groups come next, which fresh prompts are used, what is kept for reuse.

Plugins of the kind `buffers` subclass `BufferBase` and override what they change; the data source owns one and calls
it. THUDM/slime's buffer filters, plain functions, stay the short form for choosing among waiting groups. A buffer is
state of the run. Everything that decides its next answer, random draws included, must be in `state_dict`, or a resumed
run goes another way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime_core.protocols import Args
from slime_core.types import Group, Sample


class BufferBase:
    """Groups that were given back, oldest first; every fresh prompt is used and nothing is kept for reuse."""

    replays: bool | int = False
    """How often a group may be trained on again because this buffer gives it out once more; True: without limit. What
    `slime ledger verify` holds the run to."""
    drops: bool = False
    """Whether a group that was given back may go without ever being drawn again (too old, no room)."""

    num_dropped: int = 0
    """Groups that a filter function removed without returning them, over the run."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.rollout_id: int | None = None
        """The rollout that draws; None where it is not known."""
        self.weight_version = 0
        """The newest weight version when that rollout began."""
        self._waiting: deque[Group] = deque()

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self._waiting)

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """A rollout is about to draw."""
        self.rollout_id, self.weight_version = rollout_id, weight_version

    def add(self, groups: list[Group]) -> None:
        """Take groups that a rollout gives back: partial, finished in excess, or to be regenerated."""
        self._waiting.extend(groups)

    def take(self, num_groups: int) -> list[Group]:
        """Up to `num_groups` groups, which leave the buffer; fresh prompts make up for the rest."""
        return [self._waiting.popleft() for _ in range(min(num_groups, len(self._waiting)))]

    def wants(self, prompt: Sample) -> bool:
        """Whether the next prompt of the data set is used now; one that is not comes up again in the next epoch.

        `prompt.row` is its identity, the same in every epoch. After a whole epoch of refusals in a row the source
        uses the next prompt all the same.
        """
        return True

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Scored groups: those a rollout hands to training, or one that its dynamic filter dropped.

        They are the run's own and go on being used: copy what you keep.
        """

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call, under their full names."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON holds it; part of the checkpoint."""
        return {"groups": self.pack(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._waiting = deque(self.unpack(state["groups"]))

    @staticmethod
    def pack(groups: Iterable[Group]) -> list[list[dict[str, Any]]]:
        """Groups as JSON values."""
        return [[sample.to_dict() for sample in group] for group in groups]

    @staticmethod
    def unpack(state: Iterable[Sequence[Mapping[str, Any]]]) -> list[Group]:
        """Inverse of `pack`."""
        return [[Sample.from_dict(data) for data in group] for group in state]
