"""`slime ledger verify`: prove from a commit's ledger that no prompt was skipped and none was trained on too often.

`verify` is a pure function of the result of `slime_runs.history.read_history`; each `_check_...` yields one line per
problem. A run declares exceptions from "every group once" in the headers of its segments: its buffer returns groups
again (`replays`) or drops them (`buffer_drops`), or its rollout function may leave groups out (`leaves_out`). Only a
data source with a cursor allows a proof that no group is missing. For a data source without a cursor everything else is
checked, and the report says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slime_core.data.ledger import DROPPED, LEFT_OUT, REMOVED, TAKEN
from slime_core.errors import rollout_name, rollout_number
from slime_runs.history import History, Replay, replay

_NAMED = 8
"""Maximum number of examples listed in a line; the line counts the rest."""


@dataclass(frozen=True)
class Report:
    """The result of the check."""

    problems: list[str]
    """Problems, one line each; empty if the ledger is valid."""
    facts: dict[str, Any]
    """Counts, as JSON values."""
    notes: list[str]
    """Checks that were not possible, with the reasons."""


def verify(history: History) -> Report:
    """Check one commit's ledger."""
    result = replay(history)
    problems = [
        *result.problems,
        *_check_policy(history),
        *_check_times(history, result),
        *_check_open(history, result),
        *_check_stored(history, result),
        *_check_numbers(history, result),
        *_check_rows(history, result),
        *_check_rollouts(history, result),
        *_check_staleness(history, result),
    ]
    return Report(problems, _facts(history, result), list(_notes(history)))


def replays_of(history: History) -> int:
    """Return how often a group may be trained on again, the maximum over the parts of the run; -1: without limit."""
    declared = [int(s.header["policy"]["replays"]) for s in history.segments]
    return -1 if -1 in declared else max(declared, default=0)


def _check_policy(history: History) -> Iterator[str]:
    """Check that groups were lost only if the run declared it."""
    for segment, event in history.events():
        policy = segment.header["policy"]
        if event["event"] != DROPPED:
            continue
        if event["reason"] == LEFT_OUT and not policy["leaves_out"]:
            yield f"group {event['group']} was drawn and then lost by a rollout function that accounts for every group"
        if event["reason"] == REMOVED and not policy["buffer_drops"]:
            yield (
                f"group {event['group']} was given back and is gone from the buffer, which does not declare that it"
                " drops groups (`drops = True`)"
            )


def _check_times(history: History, result: Replay) -> Iterator[str]:
    """Check that no group was trained on more often than declared, and none was left behind by the commit's weights."""
    replays = replays_of(history)
    for record in result.groups.values():
        if replays >= 0 and record.times > 1 + replays:
            rollouts = [rollout_number(rollout) for rollout in (*record.trained, *record.pending.elements())]
            allowed = f"once and {replays} times again" if replays else "once"
            yield (
                f"group {record.index} was trained on {record.times} times (rollouts {_some(rollouts)});"
                f" allowed: {allowed}"
            )
        for rollout in (r for r in sorted(+record.pending) if r <= history.rollout_id):
            yield (
                f"group {record.index} was taken for {rollout_name(rollout)} and is not recorded as trained, though the"
                f" commit is of {rollout_name(history.rollout_id)}"
            )
        for rollout in (r for r in record.trained if r > history.rollout_id):
            newest = rollout_number(history.rollout_id)
            yield f"group {record.index} was trained at {rollout_name(rollout)}, after the commit's {newest}"


def _check_open(history: History, result: Replay) -> Iterator[str]:
    """Check that the commit's list of open groups agrees with the events."""
    stated = Counter((e["group"], e["state"], e.get("rollout")) for e in history.found["open"])
    events: Counter[tuple[int, str, Any]] = Counter()
    for record in result.groups.values():
        if record.state is not None:
            events[record.index, record.state, None] += 1
        for rollout, times in (+record.pending).items():
            events[record.index, TAKEN, rollout] += times
    for group, state, rollout in sorted((stated - events).keys(), key=str):
        place = _place(rollout)
        there = result.groups[group].describe() if group in result.groups else "without any event"
        yield f"group {group} is {state}{place} in the commit, but by its events it is {there}"
    for group, state, rollout in sorted((events - stated).keys(), key=str):
        yield f"group {group} is {state}{_place(rollout)} by its events, but the commit does not list it as open"
    if history.found["rollout"] != history.rollout_id:
        found = rollout_name(history.found["rollout"])
        yield f"ledger.json is of {found}, the commit of {rollout_name(history.rollout_id)}"


def _place(rollout: int | None) -> str:
    return "" if rollout is None else f" for {rollout_name(rollout)}"


def _check_stored(history: History, result: Replay) -> Iterator[str]:
    """Open groups' samples are in the commit, and no others are."""
    if not history.found["stores_its_groups"]:
        return
    start = (history.start["cursor"] or {}).get("next_group_index", 0)
    open_groups = {e["group"] for e in history.found["open"]}
    for group in sorted(open_groups - history.stored):
        record = result.groups.get(group)
        state = record.describe() if record else "open"
        yield f"group {group} is {state}, but the commit does not hold its samples"
    for group in sorted(history.stored - open_groups):
        record = result.groups.get(group)
        if record is None and group >= start:
            yield f"group {group} waits in the commit and was never recorded"
        elif record is not None and replays_of(history) == 0:
            yield f"group {group} waits in the commit, though it is {record.describe()}"


def _check_numbers(history: History, result: Replay) -> Iterator[str]:
    """Check that every group number up to the cursor was recorded, and none beyond it."""
    cursor = history.found["cursor"]
    if cursor is None:
        return
    first = (history.start["cursor"] or {}).get("next_group_index", 0)
    drawn = {record.index for record in result.groups.values() if record.is_drawn}
    missing = set(range(first, cursor["next_group_index"])) - result.groups.keys()
    if missing:
        yield f"groups {_some(sorted(missing))} were numbered by the data source and never recorded as drawn"
    beyond = [index for index in drawn if index >= cursor["next_group_index"]]
    if beyond:
        yield (
            f"groups {_some(sorted(beyond))} were drawn, though the commit's cursor stands at group"
            f" {cursor['next_group_index']}: they will be drawn again"
        )


def _check_rows(history: History, result: Replay) -> Iterator[str]:
    """Check that every row that the cursor has passed became a group or was skipped, once per epoch."""
    cursor = history.found["cursor"]
    if cursor is None or not cursor["num_rows"]:
        return
    start = history.start["cursor"] or {"epoch": 0, "offset": 0}
    for epoch in range(start["epoch"], cursor["epoch"] + 1):
        begins = start["offset"] if epoch == start["epoch"] else 0
        ends = cursor["offset"] if epoch == cursor["epoch"] else cursor["num_rows"]
        rows = result.rows.get(epoch, Counter())
        twice = sorted(row for row, times in rows.items() if times > 1)
        if twice:
            yield f"epoch {epoch}: rows {_some(twice)} came up more than once"
        if len(rows) == ends - begins:
            continue
        missing = sorted(set(range(cursor["num_rows"])) - rows.keys()) if ends - begins == cursor["num_rows"] else []
        named = f"; missing: rows {_some(missing)}" if missing else ""
        yield f"epoch {epoch}: the cursor has passed {ends - begins} rows, and {len(rows)} are accounted for{named}"
    later = sorted(epoch for epoch in result.rows if not start["epoch"] <= epoch <= cursor["epoch"])
    if later:
        yield f"rows of epochs {_some(later)} are recorded; the commit's cursor stands in epoch {cursor['epoch']}"


def _check_rollouts(history: History, result: Replay) -> Iterator[str]:
    """Check that every rollout up to the commit's exists, with as many groups as the settings say or a reason."""
    first = history.start["rollout"]
    first = min(result.rollouts, default=history.rollout_id + 1) if first is None else first
    for rollout in range(first, history.rollout_id + 1):
        if rollout not in result.rollouts:
            yield f"{rollout_name(rollout)} was trained on, and no group was recorded for it"
    for number, record in sorted(result.rollouts.items()):
        if record.taken != record.groups:
            yield f"{rollout_name(number)} had {record.groups} groups, but {record.taken} are recorded as taken for it"
        if record.groups != record.expected and not record.reason and not record.may_differ:
            yield (
                f"{rollout_name(number)} had {record.groups} groups instead of --rollout-batch-size {record.expected},"
                " and no reason is recorded"
            )


def _check_staleness(history: History, result: Replay) -> Iterator[str]:
    """Check that no token that was trained on is older than `--max-staleness` allows."""
    for event, limit in result.stale:
        if event["rollout"] > history.rollout_id:  # it waits; `--staleness-policy` is applied when its turn comes
            continue
        retold = result.retold.get(event["rollout"])
        version = retold["version"] if retold else event["version"]
        versions = retold["versions"].get(str(event["group"])) if retold else event.get("versions")
        if limit is None or versions is None:
            continue
        oldest = versions[0]
        if version - oldest > limit:
            yield (
                f"group {event['group']} trained weights of version {version} at"
                f" {rollout_name(event['rollout'])} with tokens of version {oldest}: staleness {version - oldest},"
                f" --max-staleness {limit}"
            )


def _facts(history: History, result: Replay) -> dict[str, Any]:
    records = list(result.groups.values())
    cursor = history.found["cursor"]
    return {
        "rollout": history.rollout_id,
        "segments": len(history.segments),
        "groups": len(records),
        "drawn": sum(r.is_drawn for r in records),
        "trained": sum(bool(r.trained) for r in records),
        "trained_again": sum(max(0, len(r.trained) - 1) for r in records),
        "dropped": dict(sorted(Counter(r.dropped for r in records if r.dropped).items())),
        "open": dict(sorted(Counter(e["state"] for e in history.found["open"]).items())),
        "foreign": result.foreign,
        "retries": sum(r.retries for r in records),
        "rollouts": len([r for r in result.rollouts if r <= history.rollout_id]),
        "rows": sum(sum(rows.values()) for rows in result.rows.values()),
        "rows_skipped": dict(sorted(result.skipped.items())),
        "epochs_finished": cursor["epoch"] + (cursor["offset"] == cursor["num_rows"]) if _has_rows(cursor) else None,
    }


def _has_rows(cursor: dict[str, int] | None) -> bool:
    return bool(cursor and cursor["num_rows"])


def _notes(history: History) -> Iterator[str]:
    if history.found["cursor"] is None:
        yield "the data source has no cursor: that no prompt was passed over is not checked"
    if not history.found["stores_its_groups"]:
        yield "the data source saves its groups itself: that open groups are saved is not checked"
    if because := history.start.get("because"):
        first = rollout_name(history.start["rollout"])
        yield f"the ledger begins at {first} ({because}); what was before is not checked"
    if replays_of(history) == -1:
        yield "the run declares that groups may be trained on any number of times"


def summary(report: Report) -> str:
    """Return the counts in a line."""
    facts = report.facts
    again = f", and {facts['trained_again']} times one of them again" if facts["trained_again"] else " once"
    parts = [
        f"{facts['groups']} groups",
        f"{facts['trained']} trained on{again} in {facts['rollouts']} rollouts",
        f"{sum(facts['dropped'].values())} dropped{_listed(facts['dropped'])}",
        f"{sum(facts['open'].values())} open{_listed(facts['open'])}",
    ]
    if facts["foreign"]:
        parts.append(f"{facts['foreign']} not from the data source")
    if facts["epochs_finished"] is not None:
        skipped = facts["rows_skipped"]
        parts.append(
            f"{facts['rows']} rows accounted for, {sum(skipped.values())} of them skipped{_listed(skipped)},"
            f" {facts['epochs_finished']} epochs finished"
        )
    parts.append(f"{facts['segments']} segments intact")
    return "; ".join(parts)


def _listed(counts: dict[str, int]) -> str:
    return f" ({', '.join(f'{n} {word}' for word, n in counts.items())})" if counts else ""


def _some(numbers: Iterable[int]) -> str:
    every = list(numbers)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(map(str, every[:_NAMED])) + more
