"""`slime check` (train): find what is wrong with a run before it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from slime_core.plugins.commands import Parser
from slime_core.protocols import Command
from slime_core.text import json_text, plain

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.protocols.command import Finding

COMMANDS = ("train", "sft", "rollout", "eval")

_HELP = """usage: slime check [RUN.yaml] [--for COMMAND] [--flags-only] [--strict] [--json] [flags]

Look for everything that can be found wrong before a run: settings, components (each is loaded in a fresh process and
called once), data, tokenizer, chat template, sizes, paths, memory, disk space. Nothing is started or written;
inputs that --prepare-path makes are made in a temporary directory for it.

  RUN.yaml       same as --config RUN.yaml
  --for COMMAND  check for that command: train (default), sft, rollout, eval
  --flags-only   look at the flags alone, on a machine that has neither the model, nor the data, nor the backends
  --strict       warnings count as errors
  --json         one JSON object per finding

All other flags are settings; `slime train --help-all` lists them. Exit status: 0, or 1 when there is an error."""


def run(argv: list[str]) -> int:
    """Print the findings. Raises ConfigError and PluginError for problems that stop the check itself."""
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    parser = Parser(prog="slime check", add_help=False, allow_abbrev=False)
    parser.add_argument("--for", dest="command", choices=COMMANDS, default="train")
    parser.add_argument("--flags-only", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(argv)
    from slime_commands.check.preflight import all_findings
    from slime_core.config.load import BACKENDS
    from slime_core.errors import ConfigError
    from slime_core.launch.prepare import prepare
    from slime_core.plugins.presets import load_settings
    from slime_core.protocols.command import Finding, Level

    if own.flags_only:
        settings = check_flags(rest, command=own.command)
        told = Finding("flags", Level.OK, f"accepted for {', '.join(settings.cite(name) for name in BACKENDS)}")
        print(as_json(told) if own.json else plain(f"{told.level.value:<8} {told.subject}: {told.message}"))
        return int(own.strict and bool(settings.warnings))
    learn = own.command in ("train", "sft")
    settings = load_settings(rest, command=own.command)
    with TemporaryDirectory(prefix="slime-check-") as folder:
        elsewhere = made_elsewhere(settings, Path(folder))
        if elsewhere:
            origins = settings.origins
            settings = load_settings([*rest, *elsewhere], command=own.command)
            for name in ("hf_checkpoint", "prompt_data", "eval_prompt_data"):  # as if their origin named these
                settings.origins[name] = origins[name]
        try:
            with redirect_stdout(sys.stderr):  # a recipe may tell what it makes
                run = prepare(settings, learn=learn, make=bool(elsewhere))
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{folder}{os.sep}", "")) from error
        findings = [
            replace(found, message=found.message.replace(f"{folder}{os.sep}", "")) for found in all_findings(run)
        ]
        if elsewhere:
            made = f"{settings.cite('prepare_path')} has made model and data in a temporary directory"
            findings.insert(0, Finding("inputs", Level.NOTE, made))
    bad = {Level.ERROR, Level.WARNING} if own.strict else {Level.ERROR}
    for finding in findings:
        print(as_json(finding) if own.json else plain(f"{finding.level.value:<8} {finding.subject}: {finding.message}"))
    errors = sum(finding.level in bad for finding in findings)
    if not own.json:
        print(f"{errors} to mend" if errors else "ready to run")
    return int(errors > 0)


def check_flags(argv: Sequence[str], *, command: str = "train") -> Settings:
    """Read flags, type them, and check them against each other and against the flags that the backends support.

    The objects that the flags name need not exist: no model, data, function, configuration file or installed backend.

    Args:
        argv: Flags, without the command's name.
        command: The command that the flags are for.

    Returns:
        The settings, with all warnings, which are logged as well.

    Raises:
        ConfigError: A flag is unknown, malformed, contradicts another, or is refused.
        PluginError: No trainer or engine has the name given.
    """
    from slime_core.launch.checks import warn_unsupported
    from slime_core.launch.components import Components, Resolver, named_transport
    from slime_core.plugins.discovery import search_as
    from slime_core.plugins.presets import load_settings

    settings = load_settings(argv, command=command, files=False)
    search_as(settings.args)
    resolver, args = Resolver(settings), settings.args
    trains, generates = command in ("train", "sft"), command != "sft" and not args.debug_train_only
    parts = Components(
        engine=resolver.setting("engines", "rollout_engine") if generates else None,
        trainer=resolver.setting("trainers", "train_backend") if trains and not args.debug_rollout_only else None,
        weight_transport=named_transport(resolver),
    )
    settings.warnings += warn_unsupported(settings, parts)
    return settings


def made_elsewhere(settings: Settings, folder: Path) -> list[str]:
    """Return flags that make the recipe create missing inputs in the folder, under the names of the run's inputs."""
    args = settings.args
    if not args.prepare_path:
        return []
    flags: list[str] = []

    def elsewhere(path: str) -> str:
        return str(folder / Path(path).name)

    if args.hf_checkpoint and not (Path(args.hf_checkpoint) / "config.json").is_file():
        flags += ["--hf-checkpoint", elsewhere(args.hf_checkpoint)]
    if args.prompt_data and not Path(args.prompt_data.partition("@")[0]).exists():
        flags += ["--prompt-data", elsewhere(args.prompt_data)]
    pairs = list(args.eval_prompt_data or [])
    if any(not Path(path.partition("@")[0]).exists() for path in pairs[1::2]):
        pairs[1::2] = map(elsewhere, pairs[1::2])
        flags += ["--eval-prompt-data", *pairs]
    return flags


def as_json(finding: Finding) -> str:
    """Return a finding as a line of JSON."""
    return json_text({"subject": finding.subject, "level": finding.level.value, "message": finding.message})


command = Command(run)
