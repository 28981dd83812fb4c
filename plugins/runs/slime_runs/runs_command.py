"""`slime runs DIR` (look at a run): list the runs in a directory, with the settings in which they differ, and notes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slime_core.protocols import Command
from slime_core.text import json_text

if TYPE_CHECKING:
    from slime_runs.run import Run


_WIDEST = 30


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Define `slime runs`."""
    text = "the runs in a directory, and the settings in which they differ"
    parser = subparsers.add_parser("runs", help=text, description=text)
    parser.add_argument("folder", nargs="?", default="outputs", metavar="DIR", help="where runs lie (default: outputs)")
    parser.add_argument("--note", metavar="TEXT", help="write a note on the run DIR, which lists show; '' removes it")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")


def run(namespace: argparse.Namespace) -> int:
    """Print. Raises RunError."""
    from slime_runs.run import differences, find_runs
    from slime_runs.text import number, table

    if namespace.note is not None:
        _write_note(namespace.folder, namespace.note)
    runs = find_runs(namespace.folder)
    facts = [facts_of(run) for run in runs]
    if namespace.json:
        print("\n".join(json_text(fact) for fact in facts))
        return 0
    rows = [("run", "state", "rollouts", "reward", "evaluations", "note" * any(fact["note"] for fact in facts))]
    for fact in facts:
        found = fact["scores"].items()
        if fact["evaluation"]:
            scores = ", ".join(f"{name} {number(last)}" for name, (_, last) in found)
            rows.append((fact["run"], fact["state"], "evaluation", "-", scores, _first_line(fact["note"])))
            continue
        scores = ", ".join(f"{name} {number(first)} -> {number(last)}" for name, (first, last) in found)
        cells = fact["run"], fact["state"], str(fact["rollouts"]), number(fact["reward"]), scores
        rows.append((*cells, _first_line(fact["note"])))
    print("\n".join(table(rows)))
    differing = differences(runs)
    if differing:
        print("\nsettings that differ")
        print("\n".join(table([(name, *map(_cut, values)) for name, values in differing.items()])))
    return 0


def _write_note(folder: str, text: str) -> None:
    """Write the note of the run in `folder`. Raises RunError if `folder` is no run."""
    from slime_runs.notes import write_note
    from slime_runs.run import Run

    write_note(Run(folder).path, text)


def _first_line(note: str) -> str:
    from slime_runs.text import one_line

    return one_line(note, 2 * _WIDEST)


def _cut(value: Any) -> str:
    """Return the value in at most 30 characters; --json has it whole."""
    text = str(value)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 3] + "..."


def facts_of(run: Run) -> dict[str, Any]:
    """Return state, finished rollouts, last reward, and first and last score of each evaluation."""
    from slime_runs.overview import evaluations

    metrics = run.metrics()
    rewards = run.series("rollout/raw_reward")
    scores = {name: (found[0][1], found[-1][1]) for name, found in evaluations(metrics).items() if found}
    scores = scores or {name: (value, value) for name, value in run.scores().items()}
    done = max((line["step"] for line in metrics), default=0)
    reward = rewards[-1][1] if rewards else None
    return {
        "run": str(run.path), "state": run.state(), "evaluation": run.is_evaluation(), "rollouts": done,
        "reward": reward, "scores": scores, "note": run.note(),
    }  # fmt: skip


command = Command(run, add_parser)
