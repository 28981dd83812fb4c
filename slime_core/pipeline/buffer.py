"""Groups given back -> groups drawn again, through the buffer filter.

The data source owns one and asks it first. It is part of the data source's state, so groups of a partial rollout
survive a restart. What a reader would get wrong: the filter *removes* what it returns, and may also remove groups
it does not return (stale ones); those are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime_core.errors import CheckpointError, RolloutError
from slime_core.protocols import BufferFilter
from slime_core.types import Group, Sample


def resolve_buffer_filter(args: Any) -> BufferFilter:
    """The `buffers` plugin of `--buffer-filter-path`, "fifo" without one. Raises PluginError."""
    from slime_core.plugins.boundary import guarded
    from slime_core.plugins.resolve import resolve

    name = getattr(args, "buffer_filter_path", None) or "fifo"
    function = resolve("buffers", name, origin="--buffer-filter-path").obj
    return guarded(function, f"--buffer-filter-path {name!r}")


class SampleBuffer:
    """Waiting groups of `group_size` samples each, oldest first."""

    def __init__(self, args: Any, group_size: int, filter_fn: Callable[[], BufferFilter]) -> None:
        """`filter_fn` is asked for the filter when the first group is drawn from a buffer that has some."""
        self._args = args
        self._group_size = group_size
        self._load_filter = filter_fn
        self._filter: BufferFilter | None = None
        self._groups: list[Group] = []
        self.num_dropped = 0
        """Groups the filter removed without returning them, over the run."""

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: list[Group]) -> None:
        """Append groups. Raises RolloutError, and adds none, when one has not `group_size` samples."""
        for group in groups:
            if len(group) != self._group_size:
                raise RolloutError(
                    f"add_samples got a group of {len(group)} samples; --n-samples-per-prompt is {self._group_size}"
                )
        self._groups.extend(groups)

    def take(self, num_groups: int) -> list[Group]:
        """Up to `num_groups` groups, removed from the buffer. Raises RolloutError for a filter out of contract."""
        if not self._groups or num_groups <= 0:
            return []
        if self._filter is None:
            self._filter = self._load_filter()
        before = list(self._groups)
        taken = list(self._filter(self._args, None, self._groups, num_groups))
        self._check(taken, before, num_groups)
        self.num_dropped += len(before) - len(self._groups) - len(taken)
        return taken

    def _check(self, taken: list[Group], before: list[Group], num_groups: int) -> None:
        name = getattr(self._args, "buffer_filter_path", None) or "fifo"
        ids = {id(group) for group in taken}
        if len(taken) > num_groups:
            raise RolloutError(
                f"buffer filter {name!r} returned {len(taken)} groups; at most {num_groups} were asked for"
            )
        if len(ids) != len(taken) or not ids <= {id(group) for group in before}:
            raise RolloutError(f"buffer filter {name!r} returned a group twice, or one that was not in the buffer")
        if ids & {id(group) for group in self._groups}:
            raise RolloutError(f"buffer filter {name!r} returned a group without removing it from the buffer")

    def state_dict(self) -> dict[str, Any]:
        """Groups and counters as JSON holds them."""
        groups = [[sample.to_dict() for sample in group] for group in self._groups]
        return {"groups": groups, "num_dropped": self.num_dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises CheckpointError when the groups have another size than this run's."""
        groups = [[Sample.from_dict(data) for data in group] for group in state["groups"]]
        sizes = {len(group) for group in groups} - {self._group_size}
        if sizes:
            raise CheckpointError(
                f"the checkpoint's buffer holds groups of {sizes.pop()} samples; this run has --n-samples-per-prompt"
                f" {self._group_size}"
            )
        self._groups = groups
        self.num_dropped = int(state["num_dropped"])
