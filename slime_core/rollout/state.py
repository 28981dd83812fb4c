"""The generation side of a commit, written and read for `RolloutStage.save` and `load`.

    data_source.json     data cursor and buffer, and the weight version
    open_groups.jsonl    groups that are neither in the buffer nor trained, if a component works ahead of training
    ledger.json          every open group's state, and the last segment of events (`data.ledger_files`)

All three are one consistent snapshot: it is taken in one callback of the stage's event loop, so no group moves
meanwhile. The segment of events is stored in a directory next to the commits and is written first. If the commit fails,
the segment stays as a file without references.

The component that works ahead registers as the owner of open groups, returns them at every commit, and gets them back
on resume; `open_groups.jsonl` has one group per line::

    {"owner": "ahead", "rollout_id": 7, "state": "taken", "details": {}, "samples": [{...}, ...]}

Groups of an owner that the resumed run does not have (its mode has changed) go into the buffer when the stage starts.
Groups in flight continue after the snapshot, so they are stored as copies: as prompts, or with `--partial-rollout` with
their finished turns and rewards. Tokens that an engine has sampled for an unfinished request are not stored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from slime_core.data.buffer import is_finished
from slime_core.data.dataset import exact_json
from slime_core.data.dumps import to_json, write_lines
from slime_core.data.ledger import BUFFERED, TAKEN, LedgerSnapshot
from slime_core.data.ledger_files import (
    FORMAT,
    LEDGER_FILE,
    SEGMENTS,
    SegmentRef,
    adopt_chain,
    read_commit,
    segments_of,
    write_segment,
)
from slime_core.errors import CheckpointError
from slime_core.protocols import RolloutTraits, traits_of
from slime_core.rollout.fate import FINISHED, copy_of, prepare_return, prompts_of, remains
from slime_core.sample import Group, Sample, SampleStatus
from slime_core.sample.types import executions

if TYPE_CHECKING:
    from slime_core.rollout.pool import Finished, Flight
    from slime_core.rollout.stage import RolloutStage


logger = logging.getLogger(__name__)

STATE_FILE = "data_source.json"


class LedgerTrail:
    """The stage's ledger on disk: the last segment, which the next segment continues."""

    def __init__(self) -> None:
        self._last: SegmentRef | None = None
        self._directory: Path | None = None
        """Directory of `_last`; not the run's own directory after a resume from another directory."""
        self._start: dict[str, object] | None = None
        """Start of the ledger, for the header of its first segment; None: the run's first prompt."""

    def write(self, stage: RolloutStage, directory: Path, rollout_id: int, picture: _Picture) -> None:
        """Write the new events as a segment, and `ledger.json`."""
        target = directory.parent / SEGMENTS
        if self._last is not None and self._directory is not None and self._directory != target:
            adopt_chain(target, self._directory, self._last)
        header: dict[str, object] = {"rollout": rollout_id, "policy": policy_of(stage)}
        if self._last is None:
            first = stage.args.start_rollout_id
            header["start"] = self._start or {"cursor": None, "open": [], "rollout": first}
        self._last = write_segment(target, self._last, header, picture.ledger.lines)
        self._directory = target
        stage.ledger.forget(len(picture.ledger.lines))
        found = {
            "format": FORMAT,
            "rollout": rollout_id,
            "segment": asdict(self._last),
            "cursor": picture.cursor,
            "stores_its_groups": picture.data_source is not None,
            "open": picture.ledger.open,
        }
        (directory / LEDGER_FILE).write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))

    def read(self, stage: RolloutStage, commit: Path, waiting: Iterable[int]) -> str:
        """Take over the ledger of a commit; return a short description of it, and of missing events.

        Args:
            stage: The stage, whose data source is already restored.
            commit: The commit.
            waiting: `group_index` of the groups in its buffer.
        """
        found = read_commit(commit)
        if found is not None:
            stage.ledger.restore(found["open"])
            restored = describe(Counter(entry["state"] for entry in found["open"]))
            last = SegmentRef.of(found["segment"])
            if (segments_of(commit) / last.name).is_file():
                self._last, self._directory = last, segments_of(commit)
                return restored
            said = f"the commit's ledger is not in {segments_of(commit)}"
        else:
            entries = [{"group": key, "state": BUFFERED} for key in sorted(waiting)]
            stage.ledger.restore(entries)
            restored, said = describe({BUFFERED: len(entries)} if entries else {}), "the commit has no ledger"
        self._start = {
            "cursor": getattr(stage.parts.data_source, "cursor", None),
            "open": stage.ledger.snapshot().open,
            "rollout": int(orjson.loads((commit / "state.json").read_bytes())["rollout_id"]) + 1,
            "because": said,
        }
        return f"{restored} ({said}: a new one begins here)"


def policy_of(stage: RolloutStage) -> dict[str, object]:
    """Return the run's declared policy, which verification checks."""
    source, function, args = stage.parts.data_source, stage.parts.rollout_function, stage.args
    says = traits_of(function, RolloutTraits)
    declared = [stage.source is not None and stage.source.replays, says.replays]
    return {
        "replays": -1 if any(r is True for r in declared) else max(map(int, declared)),
        "buffer_drops": bool(getattr(source, "drops", True)),
        "leaves_out": says.leaves_out,
        "groups_per_rollout": args.rollout_batch_size,
        "max_staleness": args.max_staleness,
    }


@dataclass
class _Picture:
    """A snapshot of the generation side, as bytes."""

    data_source: bytes | None
    cursor: dict[str, int] | None
    open_groups: list[bytes]
    ledger: LedgerSnapshot


def _take_picture(stage: RolloutStage, rollout_id: int) -> _Picture:
    stage.ledger.trained_through(rollout_id)
    source, owned = stage.parts.data_source, stage.open_groups.collect()
    content: bytes | None = None
    if hasattr(source, "state_dict"):
        state = {"weight_version": stage.weight_version, "data_source": source.state_dict()}
        stage.ledger.reconcile(group_indices(state) | {g.group_index for _, g in owned if g.group_index is not None})
        content = to_json(state, "the data source's state")
    snapshot = stage.ledger.snapshot()
    states = {entry["group"]: entry["state"] for entry in snapshot.open}
    lines = [to_json(to_line(name, g, states.get(g.group_index)), f"group {g.group_index}") for name, g in owned]
    return _Picture(content, getattr(source, "cursor", None), lines, snapshot)


def save(stage: RolloutStage, directory: Path, rollout_id: int) -> None:
    """Write the state files into `directory`, and the event segment into `SEGMENTS` next to it."""
    picture = stage.between_callbacks(lambda: _take_picture(stage, rollout_id))
    if picture.data_source is not None:
        (directory / STATE_FILE).write_bytes(picture.data_source)
    else:
        stage.parts.data_source.save(rollout_id)
    if picture.open_groups:
        write_lines(directory / OPEN_GROUPS_FILE, picture.open_groups)
    stage.trail.write(stage, directory, rollout_id, picture)


def load(stage: RolloutStage, directory: Path, rollout_id: int) -> str:
    """Restore the state that `save` wrote; return a short description of the restored groups.

    Raises:
        CheckpointError: State is missing, or of another data set.
    """
    source = stage.parts.data_source
    waiting: set[int] = set()
    if hasattr(source, "load_state_dict"):
        path = directory / STATE_FILE
        if not path.is_file():
            raise CheckpointError(f"{directory}: no {STATE_FILE}; the data cursor of the run is missing")
        state = exact_json(path.read_bytes())
        source.load_state_dict(state["data_source"])
        stage.weight_version = stage.ledger.weight_version = state["weight_version"]
        waiting = group_indices((state["data_source"].get("buffer") or {}).get("state", {}).get("groups") or [])
    else:
        source.load(rollout_id)
    said = stage.trail.read(stage, directory, waiting)
    path = directory / OPEN_GROUPS_FILE
    if path.is_file():
        stage.open_groups.restore([from_line(exact_json(line)) for line in path.read_bytes().splitlines()])
    return said


def give_back(stage: RolloutStage, groups: list[OpenGroup]) -> None:
    """Put groups whose owner does not exist in this run into the buffer, to be drawn first.

    Finished groups are trained on unchanged; with `--partial-rollout` the others continue, without it they start over.
    """
    for group in groups:
        prompts = group.details.get("prompts")  # of a fan-out
        if prompts:
            group.samples = remains([Sample.from_dict(s) for s in prompts], group.samples)
        if not is_finished(group.samples) or stage.args.mask_offpolicy_in_partial_rollout:
            group.samples = prepare_return(stage.args, group.samples, group.rollout_id or 0)
    for rollout_id in sorted({g.rollout_id for g in groups if g.rollout_id is not None}):
        stage.ledger.untake(rollout_id, [g.samples for g in groups if g.rollout_id == rollout_id])
    if groups:
        stage.source.add_samples([g.samples for g in groups])
        logger.warning(
            "%d groups of the commit were generated ahead by a run of another mode; they wait in the buffer",
            len(groups),
        )


def describe(restored: Mapping[str, int]) -> str:
    """Return text such as `3 open groups (2 buffered, 1 taken)`."""
    if not restored:
        return "no open groups"
    ahead = {TAKEN: "ready to be trained on"}
    states = ", ".join(f"{count} {ahead.get(state, state)}" for state, count in sorted(restored.items()))
    total = sum(restored.values())
    return f"{total} open group{'s' * (total > 1)} ({states})"


def group_indices(value: object) -> set[int]:
    """Return every `group_index` of samples anywhere in JSON values; cheap compared with writing the values."""
    found: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Mapping):
            index = item.get("group_index")
            if index is not None and "status" in item:
                found.add(int(index))
            elif "status" not in item:
                todo.extend(item.values())
        elif isinstance(item, list | tuple) and item and isinstance(item[0], Mapping | list | tuple):
            todo.extend(item)
    return found


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


def to_line(owner: str, group: OpenGroup, state: str | None) -> dict[str, object]:
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
    details: dict[str, object] = {"state": state, "began": group.began, "spread": group.spread}
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
