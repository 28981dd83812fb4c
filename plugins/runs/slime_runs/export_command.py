"""`slime export RUN` (look at a run): write a run's samples or metrics in the format of another tool."""

from __future__ import annotations

import argparse

from slime_core.protocols import Command
from slime_core.text import json_text, plain

FORMATS = ("hf", "inspect", "otel", "perfetto", "trackio")
_TO_FOLDER = ("hf", "inspect", "perfetto")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Define `slime export`."""
    text = "a run's samples, evaluations, traces or metrics in the form of another tool"
    parser = subparsers.add_parser("export", help=text, description=text)
    parser.add_argument("run", metavar="RUN", help="run directory; nothing is written into it")
    parser.add_argument("--format", required=True, choices=FORMATS, help="which tool's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-o", "--output", metavar="DIR", help=f"new directory; for {', '.join(_TO_FOLDER)}")


def run(namespace: argparse.Namespace) -> int:
    """Write, and say what. Raises RunError, ConfigError."""
    from slime_core.errors import ConfigError
    from slime_runs import export
    from slime_runs.run import Run

    found = Run(namespace.run)
    if namespace.format in _TO_FOLDER and not namespace.output:
        raise ConfigError(f"slime export --format {namespace.format} needs -o DIR")
    if namespace.format in ("otel", "trackio") and namespace.output:
        raise ConfigError(f"slime export --format {namespace.format} sends, and writes no -o {namespace.output}")
    if namespace.output:
        to_folder = {"hf": export.to_hf, "inspect": export.to_inspect, "perfetto": export.to_perfetto}
        said = to_folder[namespace.format](found, export.new_folder(namespace.output))
    else:
        said = (export.to_trackio if namespace.format == "trackio" else export.to_otel)(found)
    facts = {"format": namespace.format, "output": namespace.output, "wrote": said}
    print(json_text(facts) if namespace.json else plain(said))
    return 0


command = Command(run, add_parser)
