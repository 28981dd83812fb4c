"""The ledger: the state of every prompt group, recorded at each change and made durable with the next commit.

`RolloutStage` owns one `Ledger`. The built-in rollout functions record in it through `RolloutContext.ledger`. For any
other rollout function, `RecordedSource` around the data source and the stage that takes the groups record both ends::

    (prompt) --drawn--> drawn -> generating -> scored --taken(r)--> taken --trained_through(r)--> trained
                ^                    |            |
                |                    +--recycled--+--dropped(reason)--> dropped
                +---- buffered <-----+------------+

`trained` and `dropped` end a group; every other state is open, and then the commit holds the group's samples. Only open
groups are kept in memory. Events wait as lines of JSON for the next commit (`data.ledger_files`). A run that is killed
loses these events together with the work that they describe. The ledger does not validate: a group that is drawn while
it is being generated is recorded like any other, and `slime ledger verify` finds it. The only immediate warning is for
a data source that hands out ended groups again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import orjson

from slime_core.errors import rollout_name
from slime_core.sample import Group

DRAWN, GENERATING, SCORED, BUFFERED, RECYCLED, TAKEN = "drawn", "generating", "scored", "buffered", "recycled", "taken"
TRAINED, DROPPED, SKIPPED = "trained", "dropped", "skipped"
ROLLOUT, TRAINING, UNTAKEN = "rollout", "training", "untaken"
OPEN = (DRAWN, GENERATING, SCORED, BUFFERED, RECYCLED, TAKEN)
"""States of a group that has not ended."""
LEFT_OUT = "left out by the rollout function"
REMOVED = "removed by the buffer"


class PassedRow(NamedTuple):
    """A row that a data source's cursor has passed: the row became a group, or was skipped for a reason."""

    epoch: int
    row: int
    group_index: int | None
    reason: str | None


class LedgerSnapshot(NamedTuple):
    """The part of a ledger that one commit has to hold."""

    lines: list[bytes]
    """New events, one JSON object each. The events of a group are in the order in which they happened."""
    open: list[dict[str, Any]]
    """Every open group: "group", "state"; if taken, also "rollout" and the weight "version" then; "retries" if any."""


class Ledger:
    """The states of a run's groups. Every method may be called from any thread.

    The `group_index` of its first sample identifies a group; groups without one are only counted when they are taken.
    """

    def __init__(self) -> None:
        self.recording = True
        """False if the run never commits: then nothing is recorded."""
        self.weight_version = 0
        """Newest weight version known to the generation side, which trains on groups taken from now on."""
        self._lock = threading.RLock()
        self._dropped: dict[int, str] = {}
        """Reason of each group that was dropped since the last `take_reasons`."""
        self._states: dict[int, str] = {}
        self._ended: set[int] = set()
        """Groups that this process has taken or dropped."""
        self._retries: dict[int, int] = {}
        self._taken: dict[int, list[int]] = {}
        """Groups of each rollout until a commit confirms that they are trained on."""
        self._versions: dict[int, int] = {}
        """Weight version of each taken rollout when it was taken."""
        self._told: dict[int, dict[str, list[int] | None]] = {}
        """Versions of each rollout's groups, as recorded when this process took the rollout."""
        self._reasons: dict[int, str] = {}
        """Reason why a rollout has too few groups, by rollout."""
        self._events: list[tuple[float, bytes]] = []

    # -- events --------------------------------------------------------------------------------------

    def drawn(self, groups: Iterable[Group], rows: Mapping[int, PassedRow] | None = None) -> None:
        """Record that the data source handed out groups, new or given back.

        Args:
            groups: The groups; those without a `group_index` and those already drawn are skipped.
            rows: Row of the data set for each `group_index`.
        """
        with self._lock:
            for group in groups:
                key = _key(group)
                if key is None or self._states.get(key) == DRAWN:
                    continue
                details: dict[str, object] = {"samples": [s.index for s in group]}
                row = (rows or {}).get(key)
                if row is not None:
                    details |= {"row": row.row, "epoch": row.epoch}
                self._move(key, DRAWN, details)

    def skipped(self, row: PassedRow) -> None:
        """Record that a row of the data set was skipped: it becomes no group in this epoch."""
        with self._lock:
            self._record(None, {"event": SKIPPED, "row": row.row, "epoch": row.epoch, "reason": row.reason})

    def generating(self, groups: Iterable[Group]) -> None:
        """Record that groups were sent to the engine."""
        self._move_all(groups, GENERATING)

    def scored(self, group: Group) -> None:
        """Record that every sample of a group has a reward or has failed. A repeated call has no effect."""
        key = _key(group)
        if key is not None and self._states.get(key) != SCORED:
            self._move_all([group], SCORED)

    def buffered(self, groups: Iterable[Group], reason: str | None = None) -> None:
        """Record groups that were given back, or that are finished and wait; skip groups that are already buffered."""
        with self._lock:
            for group in groups:
                key = _key(group)
                if key is not None and self._states.get(key) != BUFFERED:
                    self._ended.discard(key)
                    self._move(key, BUFFERED, {"reason": reason} if reason else {})

    def recycled(self, group: Group, reason: str) -> None:
        """Record that a group will be regenerated, which counts as a retry."""
        with self._lock:
            key = _key(group)
            if key is not None:
                self._retries[key] = self._retries.get(key, 0) + 1
                self._move(key, RECYCLED, {"reason": reason, "retries": self._retries[key]})

    def dropped(self, group: Group, reason: str) -> None:
        """Record that a group will never be trained on; skip it if it is not open."""
        key = _key(group)
        if key in self._states:
            self._drop(key, reason)

    def taken(self, rollout_id: int, groups: Sequence[Group], *, weight_version: int | None = None) -> None:
        """Record the groups of a rollout's batch; they count as trained with the first commit after it.

        Args:
            rollout_id: The rollout; call once for each.
            groups: All groups. Several lists with the same `group_index` are one group, unless they share samples.
            weight_version: Version of the weights that train on it; by default the newest known (see `training`).
        """
        version = self.weight_version if weight_version is None else weight_version
        with self._lock:
            keys, parts = self._taken.setdefault(rollout_id, []), _parts(groups)
            versions = [_trained_versions(samples) for _, samples in parts]
            self._versions[rollout_id], self._told[rollout_id] = version, _by_key(parts, versions)
            for (key, samples), oldest_newest in zip(parts, versions):
                details: dict[str, object] = {"rollout": rollout_id, "samples": len(samples), "version": version}
                if oldest_newest is not None:
                    details["versions"] = oldest_newest
                if key is not None:
                    if self._states.pop(key, None) is None:
                        details["foreign"] = True
                    self._retries.pop(key, None)
                    self._ended.add(key)
                    keys.append(key)
                self._record(key, {"event": TAKEN, "group": key, **details})
            event: dict[str, object] = {"event": ROLLOUT, "rollout": rollout_id, "groups": len(parts)}
            reason = self._reasons.pop(rollout_id, None)
            self._record(None, {**event, "reason": reason} if reason else event)

    def short(self, rollout_id: int, reason: str) -> None:
        """Record why a rollout has fewer groups than `--rollout-batch-size`; call before the rollout is taken."""
        self._reasons[rollout_id] = reason

    def training(self, rollout_id: int, groups: Sequence[Group], weight_version: int) -> None:
        """Record the weight version that trains on a rollout, if it differs from the one that `taken` recorded.

        Weights may have changed since `taken`. Tokens may also have been masked since for their age, with or without
        new weights, so the versions of the tokens that count are recorded again.
        """
        with self._lock:
            if rollout_id not in self._versions:
                return
            parts = _parts(groups)
            versions = _by_key(parts, [_trained_versions(samples) for _, samples in parts])
            if self._versions[rollout_id] == weight_version and self._told.get(rollout_id) == versions:
                return
            event = {"event": TRAINING, "rollout": rollout_id, "version": weight_version, "versions": versions}
            self._record(None, event)

    def trained_through(self, rollout_id: int) -> None:
        """Record that the current commit holds weights trained on every rollout up to this one."""
        with self._lock:
            for rollout in sorted(r for r in self._taken if r <= rollout_id):
                self._versions.pop(rollout, None)
                self._told.pop(rollout, None)
                for key in self._taken.pop(rollout):
                    self._record(key, {"event": TRAINED, "group": key, "rollout": rollout})

    def settle(self) -> None:
        """Record every open, unbuffered group as left out by the rollout function; call when nothing is in flight."""
        with self._lock:
            for key in [k for k, state in self._states.items() if state != BUFFERED]:
                self._drop(key, LEFT_OUT)

    def reconcile(self, stored: set[int]) -> None:
        """Record buffered groups that the commit will not hold as removed by the buffer."""
        with self._lock:
            for key in [k for k, state in self._states.items() if state == BUFFERED and k not in stored]:
                self._drop(key, REMOVED)

    # -- commits -------------------------------------------------------------------------------------

    def snapshot(self) -> LedgerSnapshot:
        """Return the events since the last commit and the open groups. The events stay until `forget`."""
        with self._lock:
            # Sorted by group, so that the same run writes the same file in whatever order the groups finish.
            lines = [line for _, line in sorted(self._events, key=lambda event: event[0])]
            return LedgerSnapshot(lines, self._open_groups())

    def forget(self, num_events: int) -> None:
        """Discard the events of a snapshot, which are on disk."""
        with self._lock:
            del self._events[:num_events]

    def restore(self, open_groups: Iterable[Mapping[str, Any]]) -> None:
        """Take over the open groups of a commit, and forget everything that this process recorded after it."""
        with self._lock:
            records = self._states, self._retries, self._taken, self._versions, self._told, self._reasons, self._dropped
            for record in records:
                record.clear()
            self._events.clear()
            self._ended.clear()
            for entry in open_groups:
                key = int(entry["group"])
                if entry["state"] == TAKEN:
                    rollout = int(entry["rollout"])
                    self._taken.setdefault(rollout, []).append(key)
                    self._versions[rollout] = int(entry.get("version", -1))
                else:
                    self._states[key] = str(entry["state"])
                if entry.get("retries"):
                    self._retries[key] = int(entry["retries"])

    def untake(self, rollout_id: int, groups: Iterable[Group]) -> None:
        """Give back a rollout that was taken but not trained on, as a resumed run of another mode does not know it."""
        with self._lock:
            self._taken.pop(rollout_id, None)
            self._versions.pop(rollout_id, None)
            self._told.pop(rollout_id, None)
            self._record(None, {"event": UNTAKEN, "rollout": rollout_id})
            self.buffered(groups, f"{rollout_name(rollout_id)} was not trained on")

    def _open_groups(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = [{"group": key, "state": self._states[key]} for key in sorted(self._states)]
        for entry in entries:
            if retries := self._retries.get(entry["group"]):
                entry["retries"] = retries
        for rollout in sorted(self._taken):
            version = self._versions.get(rollout, -1)
            known = {"state": TAKEN, "rollout": rollout, "version": version}
            entries += [{"group": key, **known} for key in sorted(self._taken[rollout])]
        return entries

    def _move_all(self, groups: Iterable[Group], state: str) -> None:
        with self._lock:
            for group in groups:
                key = _key(group)
                if key is not None:
                    self._move(key, state, {})

    def _move(self, key: int, state: str, details: Mapping[str, object]) -> None:
        self._states[key] = state
        self._record(key, {"event": state, "group": key, **details})

    def _drop(self, key: int, reason: str) -> None:
        with self._lock:
            self._states.pop(key, None)
            self._retries.pop(key, None)
            self._dropped[key] = reason
            self._ended.add(key)
            self._record(key, {"event": DROPPED, "group": key, "reason": reason})

    def ended(self, groups: Iterable[Group]) -> list[int]:
        """Return the `group_index` of each group that was taken or dropped already."""
        with self._lock:
            return [key for group in groups if (key := _key(group)) in self._ended and key is not None]

    def take_reasons(self) -> dict[int, str]:
        """Return the reason of each group dropped since the last call, by `group_index`."""
        with self._lock:
            found, self._dropped = self._dropped, {}
        return found

    def _record(self, key: int | None, event: Mapping[str, object]) -> None:
        if self.recording:
            self._events.append((float("inf") if key is None else key, orjson.dumps(event)))


_PASSED_ON = ("__len__", "__bool__", "__iter__", "__next__", "__getitem__", "__contains__", "__call__")


class RecordedSource:
    """A data source whose draws and returns are recorded; otherwise it behaves as the wrapped source.

    User code sees no difference: `isinstance`, `type(source).__name__` and methods that Python looks up on the class
    (`len`, iteration, indexing) behave as for the source. Only `type(source) is ItsClass` is False.
    """

    def __new__(cls, source: Any, ledger: Ledger) -> RecordedSource:
        """Create an object of a subclass made for this source's class."""
        own = type(source)
        passed_on = {name: _passed_on(name) for name in _PASSED_ON if hasattr(own, name)}
        named = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        made: RecordedSource = object.__new__(type(own.__name__, (cls,), passed_on | named))
        return made

    def __init__(self, source: Any, ledger: Ledger) -> None:
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_ledger", ledger)
        object.__setattr__(self, "_warned", False)
        if hasattr(source, "take_passed_rows"):
            source.take_passed_rows()  # the source keeps passed rows from the first call on

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() uses this if the type does not match
        return type(self._source)

    @property
    def replays(self) -> bool | int:
        """How often the source may hand out a group again; 0 if the source does not declare it."""
        return getattr(self._source, "replays", False)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return the source's result unchanged; the caller checks it."""
        groups: list[Group] = self._source.get_samples(num_samples)
        self._note_rows(groups)
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Give groups back."""
        self._source.add_samples(samples)
        self._ledger.buffered(samples)

    def _note_rows(self, groups: object) -> None:
        take = getattr(self._source, "take_passed_rows", None)
        rows: list[PassedRow] = [] if take is None else take()
        for row in rows:
            if row.group_index is None:
                self._ledger.skipped(row)
        if isinstance(groups, list):
            whole = [g for g in groups if isinstance(g, list) and g]
            self._warn_of_repeats(whole)
            self._ledger.drawn(whole, {r.group_index: r for r in rows if r.group_index is not None})

    def _warn_of_repeats(self, groups: list[Group]) -> None:
        """Warn once if the source hands out ended groups although it does not declare `replays`."""
        again = [] if self._warned or self.replays else self._ledger.ended(groups)
        if again:
            object.__setattr__(self, "_warned", True)
            logging.getLogger(__name__).warning(
                "the data source %s handed out %d groups again that were taken or dropped before (group_index %s): they"
                " train twice, and `slime ledger verify` will refuse the run. Give every group a new group_index, or"
                " set `replays = True` in the source's class if it repeats them on purpose",
                *(type(self._source).__name__, len(again), ", ".join(map(str, again[:4]))),
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._source, name, value)


def _passed_on(name: str) -> object:
    """Return a method that Python looks up on the class and that calls the source's method."""

    def method(self: Any, *details: object) -> object:
        return getattr(self._source, name)(*details)

    return method


def _trained_versions(samples: Iterable[Any]) -> list[int] | None:
    """Return the [oldest, newest] weight version of the sampled tokens that are trained on; None if unknown."""
    found: set[int] = set()
    for sample in samples:
        versions, mask = sample.token_weight_versions, sample.loss_mask
        if sample.is_removed or not versions:  # removed samples get zero masks
            continue
        if versions.count(versions[0]) == len(versions):  # most samples; a batch has millions of tokens
            found.update(versions[:1] if mask is None or any(mask) else ())
        else:
            found.update(versions if mask is None else compress(versions, mask))
    found = {v for v in found if v >= 0}
    return [min(found), max(found)] if found else None


def _parts(groups: Sequence[Group]) -> list[tuple[int | None, Group]]:
    """Return groups with their keys; merge lists of the same key that share no sample."""
    parts: list[tuple[int | None, Group]] = []
    newest: dict[int, int] = {}
    for group in groups:
        key = _key(group)
        place = None if key is None else newest.get(key)
        if place is not None and not {s.index for s in group} & {s.index for s in parts[place][1]}:
            parts[place][1].extend(group)
            continue
        if key is not None:
            newest[key] = len(parts)
        parts.append((key, list(group)))
    return parts


def _by_key(parts: list[tuple[int | None, Group]], versions: list[list[int] | None]) -> dict[str, list[int] | None]:
    """Return the versions of each group that has a key, by key."""
    return {str(key): found for (key, _), found in zip(parts, versions) if key is not None}


def _key(group: Group) -> int | None:
    return getattr(group[0], "group_index", None) if group else None
