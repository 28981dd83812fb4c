"""Groups that are neither in the buffer nor trained when a commit is made: stored with it, and given back on resume.

An owner is a part of the generation side that works ahead of training: it registers under a name, is asked for its
groups at every commit, and gets them back on resume. All owners' groups are one file of the commit,
`open_groups.jsonl`, one group per line::

    {"owner": "ahead", "rollout_id": 7, "state": "taken", "details": {}, "samples": [{...}, ...]}

Groups of an owner that the resumed run does not have (its mode has changed) go into the buffer, when the stage starts.
What a reader would get wrong: owners are asked in the thread of the stage's event loop, between two of its callbacks,
so what they answer fits the data source's state of the same commit; they must copy nothing and wait for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_core.types import Group, Sample

OPEN_GROUPS_FILE = "open_groups.jsonl"


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
    """What works ahead of training."""

    def open_groups(self) -> Iterable[OpenGroup]:
        """Every group it holds, in the order in which it would go on with them. Called at a commit."""

    def restore_open_groups(self, groups: list[OpenGroup]) -> None:
        """The groups of the commit that the run resumes from, before the first rollout."""


class OpenGroups:
    """The owners of one stage."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self._restored: dict[str, list[OpenGroup]] = {}

    def register(self, name: str, owner: Owner) -> None:
        """Add an owner; groups of its name that a commit held are given to it, now or when they are loaded."""
        assert name not in self._owners, f"{name} is registered"
        self._owners[name] = owner
        if name in self._restored:
            owner.restore_open_groups(self._restored.pop(name))

    def clear(self) -> None:
        """Forget owners and groups: a live run goes back to a commit, and new owners will come."""
        self._owners.clear()
        self._restored.clear()

    def collect(self) -> list[tuple[str, OpenGroup]]:
        """Every owner's groups, with their owner's name."""
        return [(name, group) for name, owner in self._owners.items() for group in owner.open_groups()]

    def restore(self, stored: Iterable[tuple[str, OpenGroup]]) -> None:
        """Hand out what a commit held; what has no owner yet waits for one to register."""
        by_owner: dict[str, list[OpenGroup]] = {}
        for name, group in stored:
            by_owner.setdefault(name, []).append(group)
        for name, groups in by_owner.items():
            if name in self._owners:
                self._owners[name].restore_open_groups(groups)
            else:
                self._restored[name] = groups

    def take_unclaimed(self) -> list[OpenGroup]:
        """The groups for which no owner has come; they are the caller's then."""
        unclaimed = [group for groups in self._restored.values() for group in groups]
        self._restored.clear()
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
