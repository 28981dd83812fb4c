"""`slime compare RUN RUN...` (look at a run): print the settings, plugins and numbers in which runs differ."""

from __future__ import annotations

import argparse
from typing import Any

from slime_core.protocols import Command
from slime_core.text import json_text, plain


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Define `slime compare`."""
    text = "settings, plugins and numbers in which runs differ"
    parser = subparsers.add_parser("compare", help=text, description=text)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories; runs that differ in --seed alone are one"
    )
    parser.add_argument(
        "--last", type=int, default=10, metavar="N", help="compare means over the last N rollouts (default: 10)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(namespace: argparse.Namespace) -> int:
    """Print. Raises RunError."""
    from slime_runs.compare import compare
    from slime_runs.run import Run, RunError

    if len(namespace.runs) < 2:
        raise RunError(f"slime compare: name two runs or more: slime compare {namespace.runs[0]} OTHER_RUN")
    found = compare([Run(path) for path in namespace.runs], last=namespace.last)
    print(json_text(found) if namespace.json else plain("\n".join(_lines(found))))
    return 0


def _lines(found: dict[str, Any]) -> list[str]:
    from slime_runs.text import number, table

    names = [", ".join(group) for group in found["groups"]]
    text = [f"{chr(ord('A') + i)}: {name}" for i, name in enumerate(names)]
    letters = [chr(ord("A") + i) for i in range(len(names))]
    for title in ("settings", "plugins"):
        if found[title]:
            rows = [("", *letters), *((name, *map(str, values)) for name, values in found[title].items())]
            text += ["", f"{title} that differ", *table(rows)]
    rows = [("", *letters, "")]
    for name, values in found["metrics"].items():
        cells = [
            number(mean) if noise is None else f"{number(mean)} +- {number(noise)}" for mean, noise in values["values"]
        ]
        rows.append((name, *cells, {True: "differ", False: "within noise", None: ""}[values["differ"]]))
    if len(rows) > 1:
        heading = f"means of rollouts {found['from']} to {found['until']}, the last that all have"
        text += ["", heading, *table(rows)]
    if any(values["differ"] is None for values in found["metrics"].values()):
        text += ["", "whether a difference is more than noise takes two runs of each, which differ in --seed"]
    return text


command = Command(run, add_parser)
