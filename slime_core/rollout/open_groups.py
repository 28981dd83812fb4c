"""Groups that are neither in the buffer nor trained at a commit: the commit stores them, and a resume restores them.

Their owner is the component of the generation side that works ahead of training. It registers under a name, returns its
groups at every commit, and gets them back on resume. The commit's file `open_groups.jsonl` has one group per line::

    {"owner": "ahead", "rollout_id": 7, "state": "taken", "details": {}, "samples": [{...}, ...]}

Groups of an owner that the resumed run does not have (its mode has changed) go into the buffer when the stage starts.
The owner's groups are read in the thread of the stage's event loop, between two of its callbacks and without waiting,
so they match the data source's state of the same commit. Groups in flight continue meanwhile, so they are stored as
copies: as prompts, or with `--partial-rollout` with their finished turns and rewards. Tokens that an engine has sampled
for an unfinished request are not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.errors import CheckpointError
from slime_core.fan_out import executions
from slime_core.rollout.fate import FINISHED, copy_of, prompts_of
from slime_core.types import Group, Sample, SampleStatus

if TYPE_CHECKING:
    from slime_core.rollout.pool import Finished, Flight

OPEN_GROUPS_FILE = "open_groups.jsonl"
WAITING, ASIDE, IN_FLIGHT = "waiting", "aside", "in_flight"
"""Values of "state" in an open group's details."""


@dataclass
class OpenGroup:
    """An unfinished group that an owner holds."""

    samples: Group
    """Samples of the group. Unfinished samples are ready to be continued, or are reset to prompts."""
    rollout_id: int | None = None
    """The rollout whose batch the group already belongs to; None if undecided."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further JSON values of the owner (retries, weight version at the start, ...)."""

    @property
    def group_index(self) -> int | None:
        """The `group_index` of the group's samples, which identifies it."""
        return self.samples[0].group_index


class Owner(Protocol):
    """A component that generates ahead of training; a stage has at most one owner."""

    def open_groups(self) -> Iterable[OpenGroup]:
        """Return every group that the owner holds, in the order in which it would continue them. Called at a commit."""

    def restore_open_groups(self, groups: list[OpenGroup]) -> None:
        """Take back the groups of the commit that the run resumes from; called before the first rollout."""


class OpenGroups:
    """The groups of the stage's owner, if it has one, and committed groups whose owner has not registered yet."""

    def __init__(self) -> None:
        self._owner: tuple[str, Owner] | None = None
        self._restored: list[tuple[str, OpenGroup]] = []

    def register(self, name: str, owner: Owner) -> None:
        """Register the owner; committed groups of its name are restored to it, now or when they are loaded."""
        assert self._owner is None, "a stage works ahead in one way"
        self._owner = name, owner
        self.restore(self._restored)

    def clear(self) -> None:
        """Forget owner and groups, because a live run returns to a commit and a new owner will register."""
        self._owner, self._restored = None, []

    def collect(self) -> list[tuple[str, OpenGroup]]:
        """Return every open group with its owner's name, also groups whose owner has not registered yet."""
        held = [] if self._owner is None else [(self._owner[0], group) for group in self._owner[1].open_groups()]
        return [*held, *self._restored]

    def restore(self, stored: list[tuple[str, OpenGroup]]) -> None:
        """Restore a commit's groups to their owner; groups of an unregistered owner wait until it registers."""
        owner, self._restored = self._owner, stored
        if owner is not None and (own := [group for name, group in stored if name == owner[0]]):
            self._restored = [entry for entry in stored if entry[0] != owner[0]]
            owner[1].restore_open_groups(own)

    def take_unclaimed(self) -> list[OpenGroup]:
        """Return and remove the groups for which no owner has registered."""
        unclaimed, self._restored = [group for _, group in self._restored], []
        return unclaimed


def to_line(owner: str, group: OpenGroup, state: str | None) -> dict[str, Any]:
    """Return a line of the file as a JSON object."""
    return {
        "owner": owner,
        "rollout_id": group.rollout_id,
        "state": state,
        "details": group.details,
        "samples": [sample.to_dict() for sample in group.samples],
    }


def from_line(line: Mapping[str, Any]) -> tuple[str, OpenGroup]:
    """Inverse of `to_line`."""
    samples = [Sample.from_dict(data) for data in line["samples"]]
    return str(line["owner"]), OpenGroup(samples, line["rollout_id"], dict(line["details"]))


# -- what a pool holds --------------------------------------------------------------------------------


def finished_to_open(group: Finished, state: str) -> OpenGroup:
    """Convert a finished group for a commit, with a fan-out's prompts, since it may have to be regenerated."""
    details: dict[str, Any] = {"state": state, "began": group.began}
    if [id(s) for s in group.samples] != [id(s) for s in group.original]:
        details["prompts"] = [s.to_dict() for s in prompts_of(group.original)]
    return OpenGroup(group.samples, details=details)


def flight_to_open(flight: Flight, *, partial: bool, scores_groups: bool) -> OpenGroup:
    """Convert a group in flight for a commit, in the state from which a resume continues it."""
    samples = _resumable(flight.original, scores_groups) if partial else prompts_of(flight.original)
    return OpenGroup(samples, details={"state": IN_FLIGHT, "began": flight.began})


def check_group_size(group: OpenGroup, size: int) -> Group:
    """Return the samples of an unfinished group. Raises CheckpointError if the run has groups of another size."""
    found = len(executions(group.samples))
    if found != size:
        raise CheckpointError(
            f"the checkpoint holds group {group.group_index}, unfinished, of {found} samples; this run has"
            f" --n-samples-per-prompt {size}. Resume with --n-samples-per-prompt {found}"
        )
    return group.samples


def _resumable(group: Group, scores_groups: bool) -> Group:
    """Return copies with the parts worth keeping: finished samples with rewards, or finished turns; else prompts."""
    kept: Group = []
    for siblings in executions(group):
        if len(siblings) > 1:  # an earlier rollout gave it back whole
            kept += [copy_of(sample) for sample in siblings]
        else:
            kept.append(_resumable_sample(siblings[0], scores_groups))
    return kept


def _resumable_sample(sample: Sample, scores_groups: bool) -> Sample:
    """Return a copy of a sample for a resume, reset to its prompt if it cannot be continued.

    A sample without a reward is scored only by a run that scores whole groups. A single fan-out sibling, just made from
    the sample, is not a group's sample. A sample whose fields do not match is being written at this moment.
    """
    try:
        sample.validate()
    except ValueError:
        return prompts_of([sample])[0]
    fan_out = sample.rollout_id is not None and sample.status in FINISHED
    unscored = sample.status in FINISHED and sample.reward is None and not scores_groups
    if sample.status == SampleStatus.FAILED or fan_out or unscored:
        return prompts_of([sample])[0]
    copy = copy_of(sample)
    if copy.response_length and copy.status == SampleStatus.PENDING:
        copy.status = SampleStatus.ABORTED
    return copy
