"""`slime plugins trace -- train ...`: run a command, then say who answered for each setting and who was called."""

from __future__ import annotations

import argparse

from slime_core.errors import ConfigError
from slime_core.plugins.trace import Trace, start, stop, table

RUNS = ("train", "sft", "eval", "rollout")
"""Commands that use plugins and end by themselves."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything after `--` is the command line to run."""
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="a command of slime with its flags"
    )


def run(namespace: argparse.Namespace) -> int:
    """Run the command; its exit status. The report goes to standard output, also when the command fails."""
    from slime_core.cli.main import main

    arguments = [*namespace.arguments]
    if arguments[:1] == ["--"]:
        del arguments[0]
    if not arguments or arguments[0] not in RUNS:
        raise ConfigError(
            f"slime plugins trace: name the command to run ({', '.join(RUNS)}), e.g."
            " slime plugins trace -- train --config run.yaml --num-rollout 1"
        )
    seen = start()
    try:
        return main(arguments)
    finally:
        stop()
        print(report(seen), flush=True)


def report(trace: Trace) -> str:
    """Two tables: settings with the components that answered, hooks with the plugins that were called."""
    lines = ["components"]
    rows: list[tuple[str, ...]] = [("SETTING", "ANSWERED BY", "FROM", "AT", "TIMES")]
    for answer in trace.answers.values():
        ref = answer.ref
        rows.append((answer.origin or "-", f"{ref.kind}/{ref.name}", ref.origin, answer.place, str(answer.times)))
    lines += table(rows) if len(rows) > 1 else ["none was resolved"]
    lines += ["", "hooks"]
    rows = [("HOOK", "PLUGIN", "CALLS", "TOTAL MS", "SLOWEST MS", "ERRORS")]
    for (hook, plugin), calls in trace.calls.items():
        times = (f"{1e3 * calls.seconds:.2f}", f"{1e3 * calls.slowest:.2f}")
        rows.append((hook, plugin, str(calls.times), *times, str(calls.errors)))
    lines += table(rows) if len(rows) > 1 else ["no hook plugin is loaded"]
    return "\n".join(lines)
