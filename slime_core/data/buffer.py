"""Groups given back -> groups drawn again, as the `buffers` plugin of `--buffer-filter-path` decides.

The data source owns a `SampleBuffer`, which checks that the plugin keeps its contract, and draws from it first. The
buffer is part of the data source's state, so groups of a partial rollout survive a restart. A filter function *removes*
the groups that it returns. It may also remove other groups (stale ones); those are dropped and counted.

Plugins of the kind `buffers` subclass `BufferBase` and override what they change. A buffer is state of the run:
everything that decides its next answer, random draws included, must be in `state_dict`, or a resumed run draws other
groups.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from slime_core.distributions import provided
from slime_core.errors import CheckpointError, RolloutError
from slime_core.plugins.resolve import resolve
from slime_core.plugins.signatures import construct
from slime_core.protocols import Args, BufferFilter, EditTraits, GroupBuffer, traits_of, with_defaults
from slime_core.sample import Group, Sample, SampleStatus
from slime_core.sample.admission import Held
from slime_core.sample.types import executions
from slime_core.workers.call import user_code

logger = logging.getLogger(__name__)

_OF_A_FILE = re.compile(r"slime_file_(.*)_[0-9a-f]{10}")
TERMINAL = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.FAILED)


def is_finished(group: Group) -> bool:
    """Return True if nothing is left to generate or score: every sample has a reward, failed or was removed."""
    return all(
        s.status in TERMINAL and (s.reward is not None or s.status == SampleStatus.FAILED or s.remove_sample)
        for s in group
    )


def resolve_buffer(args: Args) -> BufferFilter | GroupBuffer:
    """Return the `buffers` plugin of `--buffer-filter-path`, by default "fifo"; build a class. Raises PluginError."""
    from slime_core.plugins.options import option_name  # loads pydantic, which `slime why` does without

    name = _name(args)
    resolved = resolve("buffers", name, origin="--buffer-filter-path")
    found = resolved.obj
    if not inspect.isclass(found):
        return cast("BufferFilter", found)
    if hasattr(found, "take") and not issubclass(found, BufferBase):
        found = with_defaults(found, _Silent)
    with _blamed(name):
        made = construct(found, args, name=option_name(resolved.ref))
    return cast("GroupBuffer", made)


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
    def pack(groups: Iterable[Group]) -> list[list[dict[str, object]]]:
        """Return groups as JSON values."""
        return [[sample.to_dict() for sample in group] for group in groups]

    @staticmethod
    def unpack(state: Iterable[Sequence[Mapping[str, object]]]) -> list[Group]:
        """Return the groups of the result of `pack`."""
        return [[Sample.from_dict(data) for data in group] for group in state]


class _Silent(BufferBase):
    """Defaults for a user's own buffer class: without a declaration it may drop groups."""

    drops = True


class SampleBuffer:
    """A plugin with checks: only whole groups go in and come out, each once."""

    def __init__(self, args: Args, group_size: int, plugin: BufferFilter | GroupBuffer) -> None:
        """`plugin` is THUDM/slime's function or an object with the methods of `GroupBuffer`."""
        self._name = _name(args)
        self._group_size = group_size
        label = f"--buffer-filter-path {self._name!r}"
        self._held = Held(label, edits=traits_of(plugin, EditTraits, label).edits_samples)
        whole: Any = plugin
        if not hasattr(plugin, "take"):
            whole = provided("slime.data", "buffer_functions").FilteredList(args, plugin, self._name)
        self._plugin: GroupBuffer = whole

    def __len__(self) -> int:
        return len(self._plugin)

    @property
    def num_dropped(self) -> int:
        """Number of groups that a filter function removed without returning them, over the run."""
        return self._plugin.num_dropped

    @property
    def replays(self) -> bool | int:
        """How often, as declared, the plugin gives out a trained group again."""
        return self._plugin.replays

    @property
    def drops(self) -> bool:
        """True if groups given back may be dropped; also if the plugin does not declare it."""
        return self._plugin.drops

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """Pass rollout id and weight version of the next draws to the plugin."""
        with self._calling():
            self._plugin.begin_rollout(rollout_id, weight_version)

    def add(self, groups: list[Group]) -> None:
        """Append groups.

        Raises:
            RolloutError: An unfinished group does not have `group_size` samples, with fan-out siblings counted as one;
                no group is added then.
        """
        for group in groups:
            size = len(executions(group))
            if size != self._group_size and not is_finished(group):
                raise RolloutError(
                    f"add_samples got a group of {size} samples; --n-samples-per-prompt is {self._group_size}"
                )
        self._held.give(sample for group in groups for sample in group)
        with self._calling():
            self._plugin.add(groups)

    def take(self, num_groups: int) -> list[Group]:
        """Remove up to `num_groups` groups from the buffer and return them.

        Raises:
            RolloutError: The plugin broke its contract.
            PluginError: The plugin changed a sample's training data without declaring that it edits.
        """
        if num_groups <= 0:
            return []
        with self._calling():
            taken = self._plugin.take(num_groups)
        if not isinstance(taken, list):
            raise RolloutError(f"buffer {self._name!r} returned {type(taken).__name__}; expected a list of groups")
        if len(taken) > num_groups:
            raise RolloutError(
                f"buffer {self._name!r} returned {len(taken)} groups; at most {num_groups} were asked for"
            )
        for group in taken:
            if not isinstance(group, list) or not group or not all(isinstance(s, Sample) for s in group):
                raise RolloutError(
                    f"buffer {self._name!r} returned a {type(group).__name__} as a group; a group is a non-empty list"
                    " of Samples"
                )
        if len({id(group) for group in taken}) != len(taken):
            raise RolloutError(f"buffer {self._name!r} returned a group twice")
        self._held.take(sample for group in taken for sample in group)
        return taken

    def wants(self, prompt: Sample) -> bool:
        """Return whether a fresh prompt is used now."""
        with self._calling():
            return bool(self._plugin.wants(prompt))

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Show the plugin the outcome of groups."""
        shown = [] if type(self._plugin).observe is BufferBase.observe else groups  # which looks at nothing
        self._held.give(sample for group in shown for sample in group)
        with self._calling():
            self._plugin.observe(groups, trained)
        self._held.take(sample for group in shown for sample in group)

    def take_metrics(self) -> dict[str, float]:
        """Return the plugin's metrics, and the number of waiting groups."""
        with self._calling():
            return {"rollout/buffer/waiting_groups": float(len(self)), **self._plugin.take_metrics()}

    def state_dict(self) -> dict[str, Any]:
        """Return the plugin's state and type in JSON form."""
        with self._calling():
            return {"type": self._type, "state": self._plugin.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; from the state of another buffer only its waiting groups. Raises CheckpointError."""
        waiting = state["state"].get("groups") or ()
        for group in waiting:
            if len(group) == self._group_size:
                continue
            (samples,) = BufferBase.unpack([group])
            if len(executions(samples)) != self._group_size and not is_finished(samples):
                raise CheckpointError(
                    f"the checkpoint's buffer holds groups of {len(executions(samples))} samples; this run has"
                    f" --n-samples-per-prompt {self._group_size}"
                )
        if state["type"] == self._type:
            with self._calling():
                self._plugin.load_state_dict(state["state"])
            return
        logger.warning(
            "the checkpoint's buffer is a %s; --buffer-filter-path %r of this run is a %s, which gets the %d waiting"
            " groups and nothing else of the other buffer's state",
            state["type"], self._name, self._type, len(waiting),
        )  # fmt: skip
        self.add(BufferBase.unpack(waiting))

    @property
    def _type(self) -> str:
        kind = type(self._plugin)
        module = _OF_A_FILE.sub(r"\1", kind.__module__)  # the same wherever the file lies
        stored_as = kind.stored_as if issubclass(kind, BufferBase) else ""
        return stored_as or f"{module}.{kind.__qualname__}"

    def _calling(self) -> AbstractContextManager[None]:
        return _blamed(self._name)


def _name(args: Args) -> str:
    return args.buffer_filter_path or "fifo"


def _blamed(name: str) -> AbstractContextManager[None]:
    return user_code(f"--buffer-filter-path {name!r}")
