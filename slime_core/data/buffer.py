"""Groups given back -> groups drawn again, as the `buffers` plugin of `--buffer-filter-path` decides.

The data source owns a `SampleBuffer`, which holds the plugin to its contract, and asks it first. It is part of the data
source's state, so groups of a partial rollout survive a restart. A filter function
*removes* what it returns, and may also remove groups it does not return (stale ones); those are dropped and counted.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from slime_core.admission import Held
from slime_core.buffer import BufferBase
from slime_core.errors import CheckpointError, RolloutError
from slime_core.fan_out import executions
from slime_core.plugins.boundary import user_code
from slime_core.plugins.signatures import construct, positional_names, signature_of
from slime_core.protocols import Args, BufferFilter, EditTraits, GroupBuffer, traits_of, with_defaults
from slime_core.types import Group, Sample, SampleStatus

logger = logging.getLogger(__name__)

_OF_A_FILE = re.compile(r"slime_file_(.*)_[0-9a-f]{10}")
_THREE = ("args", "buffer", "num_samples")
TERMINAL = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.FAILED)


def is_finished(group: Group) -> bool:
    """Nothing is left to generate or score: every sample is finished with a reward, failed or removed."""
    return all(
        s.status in TERMINAL and (s.reward is not None or s.status == SampleStatus.FAILED or s.remove_sample)
        for s in group
    )


def resolve_buffer(args: Args) -> BufferFilter | GroupBuffer:
    """The `buffers` plugin of `--buffer-filter-path`, "fifo" without one; a class is built. Raises PluginError."""
    from slime_core.plugins.options import option_name
    from slime_core.plugins.resolve import resolve

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


class _Silent(BufferBase):
    """A buffer of somebody's own class; one that does not say so may drop groups."""

    drops = True


class SampleBuffer:
    """The plugin behind checks: whole groups go in and come out, each once."""

    def __init__(self, args: Args, group_size: int, plugin: BufferFilter | GroupBuffer) -> None:
        """`plugin` is THUDM/slime's function or an object with the methods of `GroupBuffer`."""
        self._name = _name(args)
        self._group_size = group_size
        whole: Any = plugin
        label = f"--buffer-filter-path {self._name!r}"
        self._held = Held(label, edits=traits_of(plugin, EditTraits, label).edits_samples)
        self._plugin: GroupBuffer = whole
        if inspect.isfunction(whole) or not hasattr(whole, "take"):
            self._plugin = _around_function(args, whole, self._name)

    def __len__(self) -> int:
        return len(self._plugin)

    @property
    def num_dropped(self) -> int:
        """Groups that a filter function removed without returning them, over the run."""
        return self._plugin.num_dropped

    @property
    def replays(self) -> bool | int:
        """How often the plugin declares to give out a group again that was trained on."""
        return self._plugin.replays

    @property
    def drops(self) -> bool:
        """Whether groups given back may be dropped; a plugin that is silent about it may."""
        return self._plugin.drops

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """Tell the plugin who draws."""
        with self._calling():
            self._plugin.begin_rollout(rollout_id, weight_version)

    def add(self, groups: list[Group]) -> None:
        """Append groups.

        Raises:
            RolloutError: An unfinished group has not `group_size` samples, fan-out siblings counting as one; none is
                added then.
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
        """Up to `num_groups` groups, removed from the buffer. Raises RolloutError for a plugin out of contract.

        Also PluginError where one changed what a sample is trained on, without declaring that it edits.
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
        """Whether a fresh prompt is used now."""
        with self._calling():
            return bool(self._plugin.wants(prompt))

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Show the plugin what became of groups."""
        shown = [] if type(self._plugin).observe is BufferBase.observe else groups  # which looks at nothing
        self._held.give(sample for group in shown for sample in group)
        with self._calling():
            self._plugin.observe(groups, trained)
        self._held.take(sample for group in shown for sample in group)

    def take_metrics(self) -> dict[str, float]:
        """The plugin's, and how many groups wait."""
        with self._calling():
            return {"rollout/buffer/waiting_groups": float(len(self)), **self._plugin.take_metrics()}

    def state_dict(self) -> dict[str, Any]:
        """The plugin's state and its type, as JSON holds them."""
        with self._calling():
            return {"type": self._type, "state": self._plugin.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; of another buffer's state the groups that wait. Raises CheckpointError."""
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
            "the checkpoint's buffer is a %s; --buffer-filter-path %r of this run is a %s, which starts anew: it gets"
            " the %d groups that wait, and nothing else of what the other had learned",
            state["type"], self._name, self._type, len(waiting),
        )  # fmt: skip
        self.add(BufferBase.unpack(waiting))

    @property
    def _type(self) -> str:
        kind = type(self._plugin)
        module = _OF_A_FILE.sub(r"\1", kind.__module__)  # the same wherever the file lies
        return f"{module}.{kind.__qualname__}"

    def _calling(self) -> AbstractContextManager[None]:
        return _blamed(self._name)


def _around_function(args: Args, function: Callable[..., Any], name: str) -> BufferBase:
    """A function with `rollout_id` chooses among groups that wait; one of three arguments, samples to use again."""
    signature = signature_of(function)
    if signature is None or len(positional_names(signature)) != len(_THREE):
        return FilteredList(args, function, name)
    from slime_core.data.reuse import Reuse

    return Reuse(args, function, f"--buffer-filter-path {name!r}")


class FilteredList(BufferBase):
    """A list of groups and THUDM/slime's function that takes groups out of it.

    The function may do what it likes to the list, so what it did is checked: by counting and by the ids of the groups
    held, which takes time in the groups taken and not in those waiting.
    """

    drops = True

    def __init__(self, args: Args, function: Callable[..., Any], name: str) -> None:
        super().__init__(args)
        self._function = function
        self._name = name
        self._groups: list[Group] = []
        self._held: set[int] = set()
        self.num_dropped = 0
        self._dropped_before = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: list[Group]) -> None:
        """Append to the list."""
        self._groups.extend(groups)
        self._held.update(map(id, groups))

    def take(self, num_groups: int) -> list[Group]:
        """What the function takes out. Raises RolloutError when it did not take out what it returned."""
        if not self._groups:
            return []
        before = len(self._groups)
        taken = self._function(self.args, self.rollout_id, self._groups, num_groups)
        if not isinstance(taken, list):
            raise RolloutError(f"buffer {self._name!r} returned {type(taken).__name__}; expected a list of groups")
        ids = {id(group) for group in taken}
        if len(ids) != len(taken) or not ids <= self._held:
            raise RolloutError(f"buffer {self._name!r} returned a group twice, or one that was not in the buffer")
        dropped = before - len(self._groups) - len(taken)
        self._held -= ids
        if dropped > 0:
            self._held = {id(group) for group in self._groups}
        if dropped < 0 or (dropped > 0 and ids & self._held):
            raise RolloutError(f"buffer {self._name!r} returned a group without removing it from the buffer")
        self.num_dropped += dropped
        return taken

    def take_metrics(self) -> dict[str, float]:
        """Groups removed and not returned since the last call."""
        dropped, self._dropped_before = self.num_dropped - self._dropped_before, self.num_dropped
        return {"rollout/buffer/dropped_groups": float(dropped)} if dropped else {}

    def state_dict(self) -> dict[str, Any]:
        """Groups and counter."""
        return {"groups": self.pack(self._groups), "num_dropped": self.num_dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._groups = self.unpack(state["groups"])
        self._held = {id(group) for group in self._groups}
        self.num_dropped = self._dropped_before = int(state["num_dropped"])


def _name(args: Args) -> str:
    return args.buffer_filter_path or "fifo"


def _blamed(name: str) -> AbstractContextManager[None]:
    return user_code(f"--buffer-filter-path {name!r}")
