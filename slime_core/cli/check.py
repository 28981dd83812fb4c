"""`slime check run.yaml`: everything that can be found wrong before the run, in a few seconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from slime_core.cli.parser import Parser

if TYPE_CHECKING:
    from slime_core.launch.findings import Finding

COMMANDS = ("train", "sft", "rollout", "eval")

_HELP = """usage: slime check [RUN.yaml] [--for COMMAND] [--strict] [--json] [flags]

Look for everything that can be found wrong before a run: settings, components (each is loaded in a fresh process and
called once), data, tokenizer, chat template, batch arithmetic, paths, disk space. Nothing is started or written.

  RUN.yaml       same as --config RUN.yaml
  --for COMMAND  check for that command: train (default), sft, rollout, eval
  --strict       warnings count as errors
  --json         one JSON object per finding

All other flags are settings; `slime train --help-all` lists them. Exit status: 0, or 1 when there is an error."""


def run(argv: list[str]) -> int:
    """Print the findings. Raises ConfigError and PluginError for what stops even the check."""
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    parser = Parser(prog="slime check", add_help=False, allow_abbrev=False)
    parser.add_argument("--for", dest="command", choices=COMMANDS, default="train")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(argv)
    if rest and not rest[0].startswith("-"):
        rest = ["--config", *rest]
    from slime_core.launch.findings import Level
    from slime_core.launch.preflight import preflight, starting
    from slime_core.launch.prepare import prepare
    from slime_core.plugins.presets import load_settings

    settings = load_settings(rest, command=own.command)
    run = prepare(settings, learn=own.command in ("train", "sft"), make=False)
    findings = [*preflight(run), *starting(run)]
    bad = {Level.ERROR, Level.WARNING} if own.strict else {Level.ERROR}
    for finding in findings:
        print(as_json(finding) if own.json else f"{finding.level.value:<8} {finding.subject}: {finding.message}")
    errors = sum(finding.level in bad for finding in findings)
    if not own.json:
        print(f"{errors} to mend" if errors else "ready to run")
    return int(errors > 0)


def as_json(finding: Finding) -> str:
    """One line."""
    return json.dumps({"subject": finding.subject, "level": finding.level.value, "message": finding.message})
