"""Buffers made of functions: THUDM/slime's, which takes groups out of a list, and one that chooses samples to reuse.

`FilteredList` (entry-point group `slime.data`) wraps a function (args, rollout_id, buffer, num_samples) -> groups.

`plugins.resolve` offers every buffer to `adapt` (entry-point group `slime.signatures`). A function of three arguments,
and the method `buffer_filter` of a data source, trains on finished samples again. It chooses samples and whole groups
come out, since a sample's advantage is made of its group; each is trained on again once at most, so a run always comes
back to new prompts.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from slime_core.data.buffer import BufferBase
from slime_core.errors import RolloutError
from slime_core.plugins.kinds import KINDS
from slime_core.plugins.signatures import fits, positional_names, signature_of
from slime_core.protocols import Args, EditTraits, traits_of
from slime_core.sample import Group, Sample, SampleStatus
from slime_core.sample.admission import Held

logger = logging.getLogger(__name__)

Choose = Callable[[Args, list[Sample], int], list[Sample]]
MARK = "reused"
"""Entry of `sample.metadata` of a sample that was trained on before."""
_THREE = ("args", "buffer", "num_samples")
_DONE = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


class Reuse(BufferBase):
    """Groups given back come first; then those of the samples that `choose` takes out of `kept`."""

    replays = 1
    stored_as = "slime_core.data.reuse.Reuse"

    def __init__(self, args: Args, choose: Choose | None, label: str) -> None:
        """`label` names the user's code in messages; without `choose` nothing is kept."""
        super().__init__(args)
        self.kept: list[Sample] = []
        """Finished samples of groups that were trained on once."""
        self._choose, self._label = choose, label
        self._held = Held(label, edits=traits_of(choose, EditTraits, label).edits_samples)
        if choose is not None and not (args.use_tis or args.use_rollout_logprobs):
            logger.warning(
                "%s: the samples that it chooses are trained on again, and come from older weights: --use-tis corrects"
                " for that", label,
            )  # fmt: skip

    def take(self, num_groups: int) -> list[Group]:
        """Waiting groups, then the chosen samples' groups. Raises RolloutError for an answer out of contract."""
        taken = super().take(num_groups)
        if self._choose is not None and self.kept and len(taken) < num_groups:
            taken += self._chosen(num_groups - len(taken))
        return taken

    def _chosen(self, num_groups: int) -> list[Group]:
        assert self._choose is not None
        kept = list(self.kept)
        answer = self._choose(self.args, self.kept, num_groups)
        of_buffer = {id(sample) for sample in kept}
        if not isinstance(answer, list) or not all(id(sample) in of_buffer for sample in answer):
            raise RolloutError(f"{self._label}: expected a list of samples of the buffer; it returned {_shape(answer)}")
        groups = {s.group_index: [k for k in kept if k.group_index == s.group_index] for s in answer}
        chosen = dict(list(groups.items())[:num_groups])
        self.kept[:] = [s for s in self.kept if s.group_index not in chosen]
        self._held.take(s for group in chosen.values() for s in group)
        for sample in (s for group in chosen.values() for s in group):
            sample.metadata[MARK] = True
        return list(chosen.values())

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Keep copies of what is trained on for the first time."""
        if self._choose is not None:
            again = reusable(groups, trained)
            self._held.give(again)
            self.kept += again

    def state_dict(self) -> dict[str, Any]:
        """Waiting groups and kept samples."""
        return {**super().state_dict(), "kept": self.pack([self.kept])[0]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        super().load_state_dict(state)
        self.kept[:] = self.unpack([state["kept"]])[0]


def reusable(groups: list[Group], trained: bool) -> list[Sample]:
    """Copies of the samples, in one list, of groups that are trained on for the first time and could be again."""
    return [
        Sample.from_dict(sample.to_dict())
        for group in groups
        if trained and all(s.status in _DONE and s.reward is not None and MARK not in s.metadata for s in group)
        for sample in group
    ]


def _shape(answer: Any) -> str:
    if isinstance(answer, list) and answer:
        return f"a list with a {type(answer[0]).__name__} that is not in it"
    return type(answer).__name__


class FilteredList(BufferBase):
    """A list of groups and THUDM/slime's function that takes groups out of it.

    The function may change the list in any way, so its changes are checked: by the number of groups and the ids of the
    held groups. The time depends on the groups taken, not on the groups waiting.
    """

    drops = True
    stored_as = "slime_core.data.buffer.FilteredList"

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
        """Return the groups that the function takes out. Raises RolloutError if they are still in the buffer."""
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
        """Return the number of groups removed and not returned since the last call."""
        dropped, self._dropped_before = self.num_dropped - self._dropped_before, self.num_dropped
        return {"rollout/buffer/dropped_groups": float(dropped)} if dropped else {}

    def state_dict(self) -> dict[str, Any]:
        """Return groups and counter."""
        return {"groups": self.pack(self._groups), "num_dropped": self.num_dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self._groups = self.unpack(state["groups"])
        self._held = {id(group) for group in self._groups}
        self.num_dropped = self._dropped_before = int(state["num_dropped"])


def adapt(found: Any) -> type[Reuse] | None:
    """Return a function of three arguments as the class of a buffer; None for other objects."""
    signature = None if inspect.isclass(found) or hasattr(found, "take") else signature_of(found)
    if signature is None or len(positional_names(signature)) != len(_THREE) or not fits(KINDS["buffers"], found):
        return None

    def build(self: Any, args: Args) -> None:
        Reuse.__init__(self, args, found, f"--buffer-filter-path {args.buffer_filter_path!r}")

    own = {name: getattr(found, name) for name in ("__module__", "traits", "slime_api") if hasattr(found, name)}
    return type("Reuse", (Reuse,), {"__init__": build, **own})
