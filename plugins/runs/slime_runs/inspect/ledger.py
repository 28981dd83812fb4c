"""`slime ledger` (look at a run): show the history of every prompt group of a run.

`verify` proves that no group was lost or trained on twice. Its exit status is 0 if the ledger is consistent, else 1,
with one line per problem. The command reads a run directory's commits and their ledger; it loads neither torch nor the
run's plugins. Work since the last commit of a running run is not in the ledger yet, because a kill would undo it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.protocols import Command
from slime_core.text import json_text, plain

if TYPE_CHECKING:
    from slime_runs.history import Event, History


def add_parser(subparsers: Any) -> None:
    """Define `slime ledger` and its sub-commands."""
    text = "what became of every prompt group of a run"
    parser = subparsers.add_parser("ledger", help=text, description=text)
    commands = parser.add_subparsers(dest="ledger_command", required=True, metavar="COMMAND")
    checked = commands.add_parser("verify", help="prove that no prompt was skipped and none trained on twice")
    shown = commands.add_parser("show", help="one group's history, groups in a state, or counts")
    chosen = shown.add_mutually_exclusive_group()
    chosen.add_argument("--group", type=int, metavar="N", help="every event of one group")
    chosen.add_argument("--state", metavar="S", help="groups in a state: trained, dropped, buffered, taken, ...")
    chosen.add_argument("--summary", action="store_true", help="counts (the default)")
    for command in (checked, shown):
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("run", metavar="RUN", help="run directory, its checkpoints/, or one commit")
        command.add_argument(
            "--commit", type=int, metavar="N", help="the commit after N rollouts (default: the newest)"
        )


def run(namespace: argparse.Namespace) -> int:
    """Verify or print. Raises CheckpointError if `show` cannot read a file."""
    from slime_runs.history import read_history

    if namespace.ledger_command == "verify":
        return _verify(namespace)
    history = read_history(_commit(namespace))
    if namespace.json:
        print(json_text(_facts(history, namespace), indent=2))
        return 0
    if namespace.group is not None:
        lines = list(_group_lines(history, namespace.group))
    elif namespace.state is not None:
        lines = [f"group {index}  {said}" for index, said in _groups_in(history, namespace.state)]
    else:
        lines = list(_summary_lines(history))
    print(plain("\n".join(lines)))
    return 0


def _commit(namespace: argparse.Namespace) -> Path:
    """Return the requested commit after a check of its files."""
    from slime_core.checkpoint.store import find
    from slime_core.errors import CheckpointError
    from slime_runs.numbering import stored_rollout

    commit = find(namespace.run, stored_rollout("--commit", namespace.commit))
    if commit is None:
        raise CheckpointError(f"{namespace.run}: no commit there; name a run directory, its checkpoints/, or a commit")
    return commit


def _verify(namespace: argparse.Namespace) -> int:
    from slime_core.errors import CheckpointError
    from slime_runs.history import read_history
    from slime_runs.inspect.ledger_verify import Report, summary, verify

    place = plain(str(namespace.run))
    try:
        commit = _commit(namespace)
        place = plain(str(commit))
        report = verify(read_history(commit))
    except CheckpointError as error:
        report = Report([str(error)], {}, [])
    if namespace.json:
        found = {"commit": place, "holds": not report.problems, "problems": report.problems}
        print(json_text({**found, "facts": report.facts, "notes": report.notes}, indent=2))
        return int(bool(report.problems))
    for problem in report.problems:
        print(plain(problem))
    for note in report.notes:
        print(plain(f"note: {note}"))
    if report.problems:
        print(f"{place}: the ledger does not hold: {len(report.problems)} problem{'s' * (len(report.problems) > 1)}")
        return 1
    print(f"{place}: the ledger holds: {summary(report)}")
    return 0


def _facts(history: History, namespace: argparse.Namespace) -> dict[str, Any]:
    from slime_runs.inspect.ledger_verify import verify

    if namespace.group is not None:
        inherited, found = _group_events(history, namespace.group)
        before = [{"before_the_ledger": entry["state"]} for entry in inherited]
        return {"group": namespace.group, "events": [*before, *({"rollout": r, **event} for r, event in found)]}
    if namespace.state is not None:
        groups = [{"group": i, "history": said} for i, said in _groups_in(history, namespace.state)]
        return {"state": namespace.state, "groups": groups}
    report = verify(history)
    return {"facts": report.facts, "notes": report.notes, "problems": report.problems}


def _summary_lines(history: History) -> Iterator[str]:
    from slime_core.errors import rollout_number
    from slime_runs.inspect.ledger_verify import verify

    report = verify(history)
    width = max(map(len, report.facts))
    for name, value in (report.facts | {"rollout": rollout_number(report.facts["rollout"])}).items():
        shown = ", ".join(f"{n} {word}" for word, n in value.items()) or "0" if isinstance(value, dict) else value
        yield f"{name:<{width}}  {'-' if shown is None else shown}"
    yield from (f"note: {note}" for note in report.notes)
    if report.problems:
        yield f"{len(report.problems)} problems: see `slime ledger verify`"


def _groups_in(history: History, state: str) -> Iterator[tuple[int, str]]:
    """Yield the groups in `state`, by number. Raises ConfigError for an unknown state."""
    from slime_core.data.ledger import DROPPED, OPEN, TAKEN, TRAINED
    from slime_core.errors import ConfigError
    from slime_runs.history import replay

    known = (*OPEN, TRAINED, DROPPED)
    if state not in known:
        raise ConfigError(f"slime ledger show: --state {state!r}: no such state; there are: {', '.join(known)}")
    for index, record in sorted(replay(history).groups.items()):
        states = {record.state, TRAINED if record.trained else None, DROPPED if record.dropped else None}
        states |= {TAKEN} if +record.pending else set()
        if state in states:
            yield index, record.describe()


def _group_events(history: History, group: int) -> tuple[list[Event], list[tuple[Any, Event]]]:
    """Return a group's state at the ledger's start and its (rollout, event) pairs. Raises ConfigError if unknown."""
    from slime_core.errors import ConfigError

    found = [(s.header["rollout"], e) for s, e in history.events() if e.get("group") == group]
    inherited = [e for e in history.start["open"] if e["group"] == group]
    if not found and not inherited:
        raise ConfigError(f"slime ledger show: --group {group}: the ledger has no such group")
    return inherited, found


def _group_lines(history: History, group: int) -> Iterator[str]:
    from slime_core.errors import rollout_name

    inherited, found = _group_events(history, group)
    for entry in inherited:
        yield f"before the ledger  {entry['state']}"
    for rollout, event in found:
        yield f"in the commit after {rollout_name(rollout)}  {_told(event)}"


def _told(event: Event) -> str:
    from slime_core.errors import rollout_number

    details = {key: value for key, value in event.items() if key not in ("event", "group")}
    if "rollout" in details:
        details["rollout"] = rollout_number(details["rollout"])
    words = ", ".join(f"{key.replace('_', ' ')} {_value(value)}" for key, value in details.items())
    return f"{event['event']:<10}  {words}".rstrip()


def _value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


command = Command(run, add_parser, only_prints=True)
