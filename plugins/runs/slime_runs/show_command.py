"""`slime show RUN` (look at a run): print a summary of a run, live or ended."""

from __future__ import annotations

import argparse

from slime_core.protocols import Command
from slime_core.text import json_text, plain


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Define `slime show`."""
    text = "a run at a glance: curves, rollouts, evaluations, what was dropped, what the model wrote"
    parser = subparsers.add_parser("show", help=text, description=text)
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(namespace: argparse.Namespace) -> int:
    """Print. Raises RunError."""
    from slime_runs.overview import lines, overview
    from slime_runs.run import Run

    found = overview(Run(namespace.run))
    print(json_text(found) if namespace.json else plain("\n".join(lines(found))))
    return 0


command = Command(run, add_parser)
