"""`slime rehearse` (train): go through a run on this machine's CPU, small, before GPUs are spent on it."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

from slime_core.errors import ConfigError
from slime_core.plugins.commands import Parser
from slime_core.protocols import Command
from slime_core.text import json_text

LAST = ("settings", "layout", "inputs", "check", "score", "commit", "resume")
"""Stages after which a rehearsal may end."""

_HELP = """usage: slime rehearse [RUN.yaml] [--for COMMAND] [--stand-ins] [--num-gpus N] [--processes N] [--seconds S]
                      [--until STAGE] [--strict] [--json] [flags]

Check a run, then do it on this machine's CPU with a small model of the same architecture: its data, template, rewards,
functions, hooks and parallel layout, two rollouts, evaluations, a commit, a kill and a resume. Print what would have
failed, at which stage and after how many GPU minutes (of `slime plan`), and what could not be rehearsed. Everything is
written to a temporary directory.

  RUN.yaml       same as --config RUN.yaml
  --for COMMAND  train (default) or sft
  --stand-ins    write rows for data that are not on this machine, and leave out functions that are not
  --num-gpus N   plan for N GPUs; by default as many as the run takes
  --processes N  trainer processes at most (4)
  --seconds S    time for each of the two starts of the small run (90, and with several processes 30 for each more)
  --until STAGE  stop after settings, layout, inputs, check, score or commit
  --strict       warnings count as failures
  --json         one JSON object

All other flags are settings; `slime train --help-all` lists them. Exit status: 0, or 1 when the run would have
failed."""


def run(argv: list[str]) -> int:
    """Print the report. Raises ConfigError for wrong options."""
    if not argv or "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    parser = Parser(prog="slime rehearse", add_help=False, allow_abbrev=False)
    parser.add_argument("--for", dest="command", choices=("train", "sft"), default="train")
    parser.add_argument("--stand-ins", action="store_true")
    parser.add_argument("--num-gpus", type=int)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--until", choices=LAST, default=LAST[-1])
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(argv)
    for name in ("num_gpus", "processes", "seconds"):
        value = getattr(own, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"slime rehearse: --{name.replace('_', '-')} {value:g} must be a number, more than 0")
    from slime_commands.rehearse.rehearsal import rehearse
    from slime_commands.rehearse.scaled import Options

    options = Options(own.command, own.num_gpus, own.processes, own.seconds, own.stand_ins, own.until)
    with TemporaryDirectory(prefix="slime-rehearse-") as folder:
        report = rehearse(rest, options, Path(folder))
    print(json_text(report.to_dict(), indent=2) if own.json else "\n".join(report.describe(strict=own.strict)))
    return int(report.fails(strict=own.strict))


command = Command(run)
