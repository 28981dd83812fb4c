"""Groups that are neither in the buffer nor trained when a commit is made: stored with it, and given back on resume.

Their owner is what of the generation side works ahead of training: it registers under a name, is asked for its groups
at every commit, and gets them back on resume. They are a file of the commit, `open_groups.jsonl`, one group per line::

    {"owner": "ahead", "rollout_id": 7, "state": "taken", "details": {}, "samples": [{...}, ...]}

Groups of an owner that the resumed run does not have (its mode has changed) go into the buffer, when the stage starts.
The owner is asked in the thread of the stage's event loop, between two of its callbacks, so what it answers fits the
data source's state of the same commit; it waits for nothing. What is in flight goes on meanwhile, so it is stored as
copies: as prompts, or with `--partial-rollout` with its finished turns and their rewards. What an engine has sampled of
an unfinished request is not in them.
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
"""Entry "state" of an open group's details."""


@dataclass
class OpenGroup:
    """One group of an owner."""

    samples: Group
    """Unfinished ones as they are to be continued, or reset to prompts."""
    rollout_id: int | None = None
    """The rollout whose batch the group belongs to already; None: not decided."""
    details: dict[str, Any] = field(default_factory=dict)
    """JSON values of the owner's own (retries, weight version at the start, ...)."""

    @property
    def group_index(self) -> int | None:
        """The group's identity."""
        return self.samples[0].group_index


class Owner(Protocol):
    """What works ahead of training, of which a stage has at most one."""

    def open_groups(self) -> Iterable[OpenGroup]:
        """Every group it holds, in the order in which it would go on with them. Called at a commit."""

    def restore_open_groups(self, groups: list[OpenGroup]) -> None:
        """The groups of the commit that the run resumes from, before the first rollout."""


class OpenGroups:
    """What the stage's owner holds, where it has one, and what a commit held for one that is yet to come."""

    def __init__(self) -> None:
        self._owner: tuple[str, Owner] | None = None
        self._restored: list[tuple[str, OpenGroup]] = []

    def register(self, name: str, owner: Owner) -> None:
        """Name the owner; groups of its name that a commit held are given to it, now or when they are loaded."""
        assert self._owner is None, "a stage works ahead in one way"
        self._owner = name, owner
        self.restore(self._restored)

    def clear(self) -> None:
        """Forget owner and groups: a live run goes back to a commit, and a new owner will come."""
        self._owner, self._restored = None, []

    def collect(self) -> list[tuple[str, OpenGroup]]:
        """Every open group, also of an owner who is yet to come, with its owner's name."""
        held = [] if self._owner is None else [(self._owner[0], group) for group in self._owner[1].open_groups()]
        return [*held, *self._restored]

    def restore(self, stored: list[tuple[str, OpenGroup]]) -> None:
        """Hand out what a commit held; what is another owner's waits for it to register."""
        owner, self._restored = self._owner, stored
        if owner is not None and (own := [group for name, group in stored if name == owner[0]]):
            self._restored = [entry for entry in stored if entry[0] != owner[0]]
            owner[1].restore_open_groups(own)

    def take_unclaimed(self) -> list[OpenGroup]:
        """The groups for which no owner has come; they are the caller's then."""
        unclaimed, self._restored = [group for _, group in self._restored], []
        return unclaimed


def to_line(owner: str, group: OpenGroup, state: str | None) -> dict[str, Any]:
    """One line of the file, as JSON holds it."""
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
    """A finished group for a commit; a fan-out's prompts go with it, as it may have to be regenerated."""
    details: dict[str, Any] = {"state": state, "began": group.began}
    if [id(s) for s in group.samples] != [id(s) for s in group.original]:
        details["prompts"] = [s.to_dict() for s in prompts_of(group.original)]
    return OpenGroup(group.samples, details=details)


def flight_to_open(flight: Flight, *, partial: bool, scores_groups: bool) -> OpenGroup:
    """A group in flight for a commit, as it is to be continued."""
    samples = _resumable(flight.original, scores_groups) if partial else prompts_of(flight.original)
    return OpenGroup(samples, details={"state": IN_FLIGHT, "began": flight.began})


def check_group_size(group: OpenGroup, size: int) -> Group:
    """The samples of an unfinished group. Raises CheckpointError when the run has groups of another size."""
    found = len(executions(group.samples))
    if found != size:
        raise CheckpointError(
            f"the checkpoint holds group {group.group_index}, unfinished, of {found} samples; this run has"
            f" --n-samples-per-prompt {size}. Resume with --n-samples-per-prompt {found}"
        )
    return group.samples


def _resumable(group: Group, scores_groups: bool) -> Group:
    """Copies with what is worth keeping: finished with its reward, or its finished turns; else the prompt."""
    kept: Group = []
    for siblings in executions(group):
        if len(siblings) > 1:  # given back whole by an earlier rollout
            kept += [copy_of(sample) for sample in siblings]
        else:
            kept.append(_resumable_sample(siblings[0], scores_groups))
    return kept


def _resumable_sample(sample: Sample, scores_groups: bool) -> Sample:
    """A sample without its reward is scored only by a run that scores whole groups. One of several siblings, which have
    just been made of it, is no group's sample by itself, and one whose fields do not fit together is being written to.
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
