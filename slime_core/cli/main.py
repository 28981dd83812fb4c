"""`slime <command>`: find the command, run it, turn errors into one line and an exit status.

A command is a module of `slime_core.cli`, imported when it is chosen, so `slime --help` loads nothing heavy. Two
shapes: commands that take the run's settings have `run(argv)`; the others have `add_parser(subparsers)` and
`run(namespace)`. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted (a run that trains: with a commit), 143
ended by SIGTERM.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from slime_core import __version__
from slime_core.cli.parser import Parser
from slime_core.cli.termination import Termination
from slime_core.errors import ConfigError, PluginError, SlimeError

USAGE_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143
"""128 + SIGTERM, as a shell reports it."""
CLOSED_PIPE = 141
"""A run ended because nobody reads its output any more: 128 + SIGPIPE, as a shell reports it."""


@dataclass(frozen=True)
class Command:
    """One sub-command."""

    name: str
    help: str
    takes_settings: bool
    """True: `run(argv)` gets every argument untouched. False: `add_parser(subparsers)`, `run(namespace)`."""
    only_prints: bool = False
    """A reader of its output that leaves early has what it wanted."""

    @property
    def module(self) -> str:
        """Where it lives."""
        return f"slime_core.cli.{self.name.replace('-', '_')}"


COMMANDS: tuple[Command, ...] = (
    Command("init", "write a run file to begin with; without arguments, list the templates", False),
    Command("train", "reinforcement learning: rollouts, rewards, optimizer steps", True),
    Command("sft", "supervised fine-tuning", True),
    Command("submit", "train or sft as a job of a Ray cluster", True),
    Command("check", "find what is wrong with a run before it starts", True),
    Command("plan", "batches, placement and memory of a run before it starts; other settings from a trace", True, True),
    Command("eval", "score a checkpoint on evaluation data", True),
    Command("rollout", "generate and score samples without training", True),
    Command("serve", "serve a checkpoint over HTTP (SGLang's and OpenAI's APIs)", False),
    Command("pull-weights", "apply weight deltas beside engines", False),
    Command("rewards", "score saved samples again with another reward", True, only_prints=True),
    Command("samples", "keep the best of saved samples as data for slime sft", False),
    Command("engines", "show the servers and routers that a run would start", True, only_prints=True),
    Command("ledger", "what became of every prompt group of a run", False, only_prints=True),
    Command("models", "architecture numbers of published models, for --model", False, only_prints=True),
    Command("tokens", "check a tokenizer and its chat template for multi-turn training", False, only_prints=True),
    Command("convert", "models between Hugging Face's layout and Megatron's", True),
    Command("why", "show what a live run is waiting for", False, only_prints=True),
    Command("plugins", "list, inspect, make and check plugins", False, only_prints=True),
    Command("config", "show settings and where each comes from", True, only_prints=True),
)


class _StandardError(logging.Handler):
    """`slime: warning: ...` on whatever standard error is at the time, for slime and its plugins (`slime_*`).

    It is the root's: with it, Python prints no more what others log and nobody handles, so it prints that, too.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("slime"):
            print(f"slime: {record.levelname.lower()}: {self.format(record)}", file=sys.stderr)
        elif logging.lastResort is not None and not self._handled(record):
            logging.lastResort.handle(record)

    def _handled(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (the process's by default) and return its exit status."""
    log, handler = logging.getLogger(), _StandardError(logging.WARNING)
    log.addHandler(handler)
    try:
        with Termination() as termination:
            return _guarded(list(sys.argv[1:] if argv is None else argv), termination)
    finally:
        log.removeHandler(handler)


def _guarded(argv: list[str], termination: Termination) -> int:
    """`_dispatch` with every expected way out turned into an exit status."""
    try:
        status = _dispatch(argv)
        sys.stdout.flush()
        return INTERRUPTED if termination.interrupted and not status else status
    except SlimeError as error:
        print("slime: error: " + str(error).replace("\n", "\n  "), file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError | PluginError) else 1
    except KeyboardInterrupt:
        print(f"slime: {'ended by SIGTERM' if termination.asked else 'interrupted'}", file=sys.stderr)
        return TERMINATED if termination.asked else INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, say) has left; a second write at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE if any(c.name == argv[0] and not c.only_prints for c in COMMANDS) else 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(f"slime {__version__}")
        return 0
    command = next((c for c in COMMANDS if c.name == argv[0]), None)
    if command is None:
        raise ConfigError(_unknown_command(argv[0]))
    module = import_module(command.module)
    if command.takes_settings:
        try:
            return int(module.run(argv[1:]))
        except SystemExit:
            if {"-h", "--help", "--help-all"}.isdisjoint(argv):  # another program's flags have been printed
                raise
            import_module("slime_core.cli.plugin_help").print_options(argv[1:])
            raise
    parser = Parser(prog="slime", allow_abbrev=False)
    module.add_parser(parser.add_subparsers(dest="command", required=True))
    return int(module.run(parser.parse_args(argv)))


def overview() -> str:
    """What `slime --help` prints."""
    rows = [*((c.name, c.help) for c in COMMANDS), ("version", "print the version")]
    width = max(len(name) for name, _ in rows)
    lines = [
        "usage: slime <command> [arguments]",
        "",
        "Reinforcement-learning post-training of language models, extended by plugins.",
        "",
        "commands:",
        *(f"  {name:<{width}}  {text}" for name, text in rows),
        "",
        "`slime <command> --help` explains one command; `slime train --help-all` lists every setting.",
    ]
    return "\n".join(lines)


def _unknown_command(word: str) -> str:
    import difflib

    names = [*(c.name for c in COMMANDS), "version"]
    close = difflib.get_close_matches(word, names, n=1)
    hint = f" Did you mean {close[0]}?" if close else f" Commands: {', '.join(names)}."
    return f"unknown command {word!r}.{hint}"
