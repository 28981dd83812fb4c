"""Data sources without groups: `get_samples(n)` returns n prompts or samples, and this module makes the groups.

`plugins.resolve` offers every data source to `adapt` (entry-point group `slime.signatures`). The class is built with
the arguments that its constructor names: `dataset` (a `PromptSet`) and `args`. If the constructor names neither, both
are set as attributes::

    class Source:
        def __init__(self, dataset, args): ...
        def get_samples(self, num_samples): return [Sample(prompt=p) for p in self.dataset.sample(num_samples)]
        def add_samples(self, samples): self.buffer.extend(samples)                       # after each rollout
        def buffer_filter(self, args, buffer, num_samples): return buffer[:num_samples]   # what to train on again

`add_samples` gets copies of the samples that a rollout trains on, all in one list, for reuse
(`buffer_functions.Reuse`). Groups that a rollout gives back unfinished are kept here, drawn first and saved, so user
code cannot lose them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.data.buffer import SampleBuffer
from slime_core.data.prompts import DatasetSource
from slime_core.errors import ConfigError, DataError, RolloutError
from slime_core.plugins.kinds import KINDS
from slime_core.plugins.options import option_name
from slime_core.plugins.resolve import resolve
from slime_core.plugins.signatures import construct, fits, signature_of
from slime_core.protocols import Args
from slime_core.sample import Group, Sample
from slime_core.workers.call import user_code
from slime_data.buffer_functions import Choose, Reuse, reusable

_FLAG = "--data-source-path"
_REMEMBERED = 4096
"""Number of prompts handed out whose label and metadata are remembered until they come back."""
_LEFT_OUT = "left out by the data source"


_OF_GROUPS = ("state_dict", "save", "begin_rollout", "observe", "take_metrics")
"""Methods that only a data source with groups and state of its own has."""


def is_flat(source: Any) -> bool:
    """Return whether a class is a flat source: its constructor names `dataset`, or it stores no state of its own."""
    signature = signature_of(source) if inspect.isclass(source) else None
    asks = signature is not None and "dataset" in signature.parameters
    return asks or (inspect.isclass(source) and not any(hasattr(source, name) for name in _OF_GROUPS))


class PromptSet:
    """The `dataset` of a flat source: the prompts of `--prompt-data`."""

    def __init__(self, source: FlatSource) -> None:
        self._source = source

    def sample(self, num_samples: int) -> list[Any]:
        """Return the next prompts, in the run's order and across epochs: texts or chat messages."""
        return [self._source.hand_out() for _ in range(num_samples)]

    def __len__(self) -> int:
        return len(self._source.rows or ())

    def __getitem__(self, index: int) -> Any:
        """Return the prompt of a row of the file. Raises IndexError, and DataError for a row that cannot be used."""
        return self._source.prompt_of(range(len(self))[index])

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


class FlatSource(DatasetSource):
    """The user's source inside the built-in source, which keeps numbers, groups, cursor, ledger and state."""

    def __init__(self, args: Args, cls: type, name: str = "") -> None:
        """`name` is the key in `plugins`. Raises DataError for unusable data, and the errors of `construct`."""
        self._handed: dict[int, tuple[Any, Sample]] = {}
        self._left: dict[int, Sample] = {}
        """Rows handed out in this draw for which no sample has come back."""
        super().__init__(args, buffer_filter=Reuse(args, None, _FLAG))
        data = PromptSet(self)
        self._user = user = construct(cls, args, name=name, dataset=data)
        for attribute, value in (("dataset", data), ("args", args)):
            if not hasattr(user, attribute):
                setattr(user, attribute, value)
        choose = getattr(user, "buffer_filter", None)
        self._reuse = _UsersBuffer(args, user, f"{_FLAG}: {cls.__name__}.buffer_filter", choose)
        self.buffer = SampleBuffer(args, self.group_size, self._reuse)

    def _open(self) -> None:
        if self.args.prompt_data:
            super()._open()

    def __len__(self) -> int:
        """Return the prompts of an epoch: the user's source's length, else the rows of `--prompt-data`."""
        return len(self._user) if hasattr(self._user, "__len__") else super().__len__()

    # -- the prompts ---------------------------------------------------------------------------------

    def hand_out(self) -> Any:
        """Return the next row's prompt."""
        if self._reader is None:
            raise ConfigError(f"{_FLAG}: the source asks for prompts; name their file with --prompt-data")
        sample = self._next_prompt()
        if sample.row is not None:
            self._left[sample.row] = sample
        return self._remembered(sample)

    def prompt_of(self, row: int) -> Any:
        """Return the prompt of `row` without moving the cursor. Raises DataError for a prompt that is too long."""
        sample = self._reader.read(row) if self._reader is not None else None
        if sample is None:
            raise DataError(f"{self._named}: row {row} has more than --rollout-max-prompt-len tokens")
        return self._remembered(sample)

    def _remembered(self, sample: Sample) -> Any:
        self._handed[id(sample.prompt)] = sample.prompt, sample
        while len(self._handed) > _REMEMBERED:
            del self._handed[next(iter(self._handed))]
        return sample.prompt

    # -- drawing -------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return buffered groups first, then fresh groups from the user's source.

        Raises:
            RolloutError: The user's source returned an invalid value.
        """
        groups = self.buffer.take(num_samples)
        missing = num_samples - len(groups)
        if not missing:
            return groups
        with user_code(_FLAG):
            answer = self._user.get_samples(missing)
        if not isinstance(answer, list) or len(answer) != missing:
            size = f" of {len(answer)}" if isinstance(answer, list) else ""
            raise RolloutError(
                f"{_FLAG}: get_samples({missing}) must return {missing} samples or prompts; it returned a"
                f" {type(answer).__name__}{size}"
            )
        groups += [self._group(item) for item in answer]
        for row in self._left:
            self._pass(row, reason=_LEFT_OUT)
        self._left.clear()
        return groups

    def _group(self, item: Any) -> Group:
        if isinstance(item, list) and item and isinstance(item[0], Sample):  # it makes groups after all
            self._reuse.shown = False
            return self._numbered(item)
        found = item.prompt if isinstance(item, Sample) else item
        prompt, drawn = self._handed.get(id(found), (None, None))
        if drawn is None or prompt is not found:
            return self._number(item if isinstance(item, Sample) else Sample(prompt=item))
        sample = copy.deepcopy(drawn)
        if sample.row is None or self._left.pop(sample.row, None) is None:
            sample.row = None  # not of this draw: the ledger knows the row's fate already
        if isinstance(item, Sample):
            sample.label = sample.label if item.label is None else item.label
            sample.metadata.update(item.metadata)
        return self._number(sample)

    def _numbered(self, group: Group) -> Group:
        for sample in group:
            if sample.group_index is None:
                sample.group_index = self._next_group
            if sample.index is None:
                sample.index, self._next_sample = self._next_sample, self._next_sample + 1
        self._next_group = max(self._next_group, *(s.group_index + 1 for s in group if s.group_index is not None))
        return group

    # -- storing -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the built-in source's state, and the user's own state if there is one."""
        own = getattr(self._user, "state_dict", None)
        return {**super().state_dict(), "user": own() if own is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`. Raises CheckpointError like the built-in source."""
        super().load_state_dict(state)
        if state.get("user") is not None:
            self._user.load_state_dict(state["user"])


def adapt(found: Any) -> type[FlatSource] | None:
    """Return a flat source as the class of a source with groups; None for any other object."""
    if not is_flat(found) or not fits(KINDS["data_sources"], found):
        return None

    def build(self: FlatSource, args: Args) -> None:
        ref = resolve("data_sources", str(args.data_source_path)).ref
        FlatSource.__init__(self, args, found, option_name(ref))

    own = {name: getattr(found, name) for name in ("__module__", "Options", "slime_api") if hasattr(found, name)}
    return type(found.__name__, (FlatSource,), {"__init__": build, **own})


class _UsersBuffer(Reuse):
    """`Reuse` over the list `buffer` of the user's source, which its `add_samples` fills."""

    stored_as = "slime_core.data.flat_source._UsersBuffer"

    def __init__(self, args: Args, user: Any, label: str, choose: Choose | None) -> None:
        super().__init__(args, choose, label)
        self._user = user
        self.shown = True
        """True if `add_samples` takes finished samples; an `add_samples` for groups would misread them."""

    @property
    def kept(self) -> list[Sample]:
        """Return the user's list, if there is one."""
        found = getattr(self._user, "buffer", None)
        return found if isinstance(found, list) and all(isinstance(s, Sample) for s in found) else []

    @kept.setter
    def kept(self, value: list[Sample]) -> None:
        assert not value, "the list is the user's"

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Show the user's source the samples that are trained on."""
        samples = reusable(groups, trained)
        if samples and self.shown:
            with user_code(_FLAG):
                self._user.add_samples(samples)
