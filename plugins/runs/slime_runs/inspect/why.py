"""`slime why` (look at a run): show what a live run waits for, and why a run's reward may not rise.

Reads the boards of its processes below RUN/waits, and metrics (`learning.py`); loads no torch. Exit status: 0 something
of the run is alive, 1 nothing is running there, 3 a wait is past its deadline.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from slime_core.errors import ConfigError
from slime_core.protocols import Command
from slime_core.text import json_text, plain
from slime_runs.boards import Report, ask_for_stacks
from slime_runs.run import Run

NOTHING, OVERDUE = 1, 3
_STACKS_WITHIN = 8.0
_PERIOD = 2.0
_KILLED = (
    "  ended without a word: SIGKILL, most often out of memory (`dmesg` or the job's log says so). A smaller"
    " --max-tokens-per-gpu, --rollout-batch-size or --rollout-max-response-len takes less; to resume: slime train"
    " --config RUN/config.yaml --load RUN"
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "why",
        help="show what a live run is waiting for, or why a finished one did not learn",
        description="Print what each process of a live run waits for, oldest wait first; if nothing is running, print"
        " what --learning does. Exit status: 0 alive, 1 nothing is running there, 3 a wait is past its deadline."
        " With --learning: 0, or 1 if the run is damaged or an invariant was broken.",
    )
    parser.add_argument("run", metavar="RUN", help="directory of the run (its --run-dir)")
    parser.add_argument(
        "--stacks", action="store_true", help="ask every process for the stacks of its threads and tasks"
    )
    parser.add_argument(
        "--learning",
        action="store_true",
        help="print damage that prevents a resume, broken invariants, and why the reward may not rise",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (with --watch one per line)")
    parser.add_argument("--watch", action="store_true", help="print again every two seconds until nothing is running")


def run(namespace: argparse.Namespace) -> int:
    """Print once, or until the run ends. Raises RunError if no run is there."""
    shown = Run(namespace.run)
    if namespace.learning:
        from slime_runs.inspect.learning import examine_run

        text, wrong = examine_run(shown)
        found = {"run": str(shown.path), "wrong": wrong, "lines": text.splitlines()}
        print(json_text(found) if namespace.json else plain(text))
        return int(wrong)
    while True:
        report = shown.waits()
        stacks = ask_for_stacks(report.answering, _STACKS_WITHIN) if namespace.stacks else {}
        print(_as_json(shown, report, stacks) if namespace.json else plain(describe(shown, report, stacks)), flush=True)
        if not namespace.watch or not report.alive:
            return NOTHING if not report.alive else OVERDUE if report.overdue else 0
        time.sleep(_PERIOD)
        if not namespace.json:
            print()


def _as_json(shown: Run, report: Report, stacks: dict[str, str | None]) -> str:
    processes = [
        {**p.board, "state": p.state, "heartbeat_age": round(p.heartbeat_age, 1)}
        | ({"stacks": stacks.get(p.name)} if p.name in stacks else {})
        for p in report.processes
    ]
    told = {"run": str(shown.path), "alive": report.alive, "overdue": report.overdue, "processes": processes}
    if not report.alive:
        told["learning"] = _learning(shown)
    paths = {"unreadable": report.unreadable, "stalls": shown.stalls()}
    return json_text({**told, **{name: [str(path) for path in found] for name, found in paths.items()}})


def describe(shown: Run, report: Report, stacks: dict[str, str | None]) -> str:
    """The text."""
    odd = [f"{path}: half-written, or of another version" for path in report.unreadable]
    if not report.processes:
        return "\n".join([*odd, f"{shown.path}: nothing is running here", *_stalls(shown), *_learning(shown)])
    lines = odd
    for process in report.processes:
        board = process.board
        lines.append(f"{board['role']}  (pid {board['pid']} on {board['host']})  {process.words}{_progress(board)}")
        if process.state == "gone":
            lines += [_KILLED.replace("RUN", str(shown.path)), "  was waiting for:"]
        lines += [f"  {_row(row, process.silence)}" for row in process.waits] or [
            "  waits for nothing by name: it works"
        ]
        if board.get("left_off"):
            lines.append(f"  and {board['left_off']} younger waits")
        if process.name in stacks:
            text = stacks[process.name]
            lines += ["", *_indented(text or f"no answer within {_STACKS_WITHIN:g} s: even its board stands still"), ""]
    if report.alive:
        return "\n".join([*lines, *_stalls(shown)])
    lines.append(f"{shown.path}: nothing is running here any more; the above is what was last said")
    return "\n".join([*lines, *_stalls(shown), *_learning(shown)])


def _learning(shown: Run) -> list[str]:
    """Return the lines of --learning; none if the run has recorded no reward."""
    from slime_runs.inspect.learning import examine_run

    try:
        return examine_run(shown)[0].splitlines()
    except ConfigError:
        return []


def _row(row: dict[str, Any], silence: float) -> str:
    number = f"{row['number']} x " if row["number"] > 1 else ""
    limit = "no deadline" if row["deadline"] is None else f"of {row['deadline']:g} s"
    mark = "OVERDUE  " if row["overdue"] else ""
    place = " (waiting for a place)" if row["queued"] else ""
    if row["waited"]:
        place = f" (running, after {row['waited']:.1f} s of waiting for a place)"
    return f"{row['age'] + silence:9.1f} s {limit:<14} {mark}{number}{row['what']}{place}; then: {row['then']}"


def _progress(board: dict[str, Any]) -> str:
    facts = dict(board.get("progress") or {})
    at = facts.pop("at", None)
    if at is None:
        return ""
    return f"; {', '.join(f'{k} {v}' for k, v in facts.items())}, {max(0.0, time.time() - at):.0f} s ago"


def _stalls(shown: Run) -> list[str]:
    reports = shown.stalls()
    return [f"stall reports, newest last: {', '.join(map(str, reports[-3:]))}"] if reports else []


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


command = Command(run, add_parser, only_prints=True)
