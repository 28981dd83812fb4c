"""`slime eval` (train): score a checkpoint on evaluation data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from typing import Any

from slime_core.cli.train import loading
from slime_core.plugins.commands import Parser
from slime_core.protocols import Command
from slime_core.text import json_text, plain
from slime_core.waits import telling_start


def run(argv: list[str]) -> int:
    """Print a table (`--json`: the report), write `eval.json` and the samples below the run directory."""
    with telling_start():
        return _eval(argv)


def _eval(argv: list[str]) -> int:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    own, argv = parser.parse_known_args(argv)
    with loading():
        from slime_commands.eval.evaluation import REPORT, evaluate, resumed_argv
        from slime_commands.eval.generation import warn_inline_only
        from slime_core.checkpoint.run_dir import run_dir_of
        from slime_core.config import load_settings
        from slime_core.errors import ConfigError
        from slime_core.launch.prepare import prepare

        settings = load_settings(resumed_argv(argv), command="eval")
    args = settings.args
    warn_inline_only(settings, "slime eval")
    if not args.eval_datasets:
        raise ConfigError("slime eval: no data set; type --eval-prompt-data NAME PATH (or --eval-config FILE)")
    with redirect_stdout(sys.stderr) if own.json else nullcontext():  # data and model may describe themselves
        report = evaluate(prepare(settings, learn=False))
    if own.json:
        print(json_text(report, indent=2))
        return 0
    width = max(map(len, report["metrics"]), default=0)
    for name, value in report["metrics"].items():
        print(plain(f"{name:<{width}}  {value:.4f}"))
    print_table(report)
    print(f"written to {run_dir_of(args) / REPORT}")
    return 0


def print_table(report: Mapping[str, Any]) -> None:
    """Print one row per data set and score, with its interval."""
    from rich.console import Console
    from rich.table import Table

    percent = f"{100 * report['confidence']:g}% interval"
    table = Table("data set", "prompts", "n", "score", "value", percent)
    for name, of_set in report["datasets"].items():
        first = [name, str(of_set["prompts"]), str(of_set["samples_per_prompt"])]
        for score, found in of_set["scores"].items():
            interval = "-" if found["low"] is None else f"{found['low']:.4f} to {found['high']:.4f}"
            table.add_row(*first, score, f"{found['value']:.4f}", interval)
            first = ["", "", ""]
        table.add_section()
    console = Console(soft_wrap=True)
    console.print(table)


command = Command(run)
