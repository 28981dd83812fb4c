"""`slime <command>`: find the command, run it, turn errors into one line and an exit status.

A command is a module that an entry point names (`plugins/commands.py`), imported when it is chosen, so `slime --help`
loads nothing heavy. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted (a run that trains:
with a commit), 143 ended by SIGTERM.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
import threading
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from slime_core import __version__
from slime_core.errors import ConfigError, PluginError, SlimeError
from slime_core.secrets import Masked, learn_flags
from slime_core.text import plain

if TYPE_CHECKING:
    from slime_core.launch.drain import Termination
    from slime_core.protocols import Command

_THREADS_S = 10.0
_HELP, _VERSION = ("-h", "--help", "help"), ("-V", "--version", "version")
_USAGE_ERROR = 2
_INTERRUPTED = 130
_TERMINATED = 143
"""128 + SIGTERM, as a shell reports it."""
_CLOSED_PIPE = 141
"""Exit status of a run whose output pipe was closed by the reader: 128 + SIGPIPE, as a shell reports it."""


class _StandardError(logging.Handler):
    """A handler that prints `slime: warning: ...` to the current standard error, for slime and plugins (`slime_*`).

    The handler is installed on the root logger, which disables Python's handler of last resort. It therefore passes
    records of other libraries that no handler takes to `logging.lastResort`.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("slime"):
            print(plain(f"slime: {record.levelname.lower()}: {self.format(record)}"), file=sys.stderr)
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
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out and Masked(out), err and Masked(err)
    status = _main(list(sys.argv[1:] if argv is None else argv))
    sys.stdout, sys.stderr = out, err  # not after a bug, whose traceback Python has yet to print
    if argv is None:
        _leave_threads(status)
    return status


def _leave_threads(status: int) -> None:
    """End the process after a while if Python's own end waits for threads of user code that do not end."""
    left = [thread for thread in threading.enumerate() if not thread.daemon]
    left.remove(threading.current_thread())

    def leave() -> None:
        names = ", ".join(thread.name for thread in left if thread.is_alive())
        print(f"slime: warning: thread {names} did not end within {_THREADS_S:g} s", file=sys.stderr)
        sys.stdout.flush()
        os._exit(status)

    if left:  # idle threads of a pool end only when Python does
        timer = threading.Timer(_THREADS_S, leave)
        timer.daemon = True
        timer.start()
        atexit.register(timer.cancel)


def _main(words: list[str]) -> int:
    log, handler = logging.getLogger(), _StandardError(logging.WARNING)
    log.addHandler(handler)
    try:
        if not words or words[0] in _HELP + _VERSION:
            return _guarded(words, None)
        from slime_core.launch.drain import Termination, collect_seldom, no_silent_exit

        collect_seldom()
        with Termination() as termination, no_silent_exit():
            return _guarded(words, termination)
    finally:
        log.removeHandler(handler)


def _guarded(argv: list[str], termination: Termination | None) -> int:
    """Run the command and turn every expected exception into an exit status."""
    command, status = None, 0
    if argv[:1] == ["help"] and len(argv) > 1:
        argv = [*argv[1:], "--help"]
    learn_flags(argv)
    try:
        if not argv or argv[0] in _HELP:
            print(overview(argv))
        elif argv[0] in _VERSION:
            print(f"slime {__version__}")
        else:
            from slime_core.plugins.commands import load

            command = load(argv)
            status = _run(command, argv)
        sys.stdout.flush()
        return _INTERRUPTED if termination and termination.interrupted and not status else status
    except SlimeError as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", [])]).replace("\n", "\n  ")
        print(plain(f"slime: error: {said}"), file=sys.stderr)
        return _USAGE_ERROR if isinstance(error, ConfigError | PluginError) else 1
    except KeyboardInterrupt:
        asked = termination is not None and termination.asked
        print(f"slime: {'ended by SIGTERM' if asked else 'interrupted'}", file=sys.stderr)
        return _TERMINATED if asked else _INTERRUPTED
    except BrokenPipeError:
        closed = select.poll()
        for stream in (sys.stdout, sys.stderr):
            closed.register(stream, 0)  # reports nothing but the end of the reader
        if not closed.poll(0):
            raise  # another pipe of the command is broken
        # The reader (`head`, say) has left; a second write at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if command is None or command.only_prints else _CLOSED_PIPE
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(plain(f"slime: error: {stop.code}"), file=sys.stderr)
        return 1


def _run(command: Command, argv: list[str]) -> int:
    if command.add_parser is None:
        try:
            return int(command.run(argv[1:]))
        except SystemExit:
            if {"-h", "--help", "--help-all"}.isdisjoint(argv):  # another program's flags have been printed
                raise
            from slime_core.distributions import offered

            if (print_options := offered("slime.api", "print_plugin_options")) is not None:
                print_options(argv[1:])
            raise
    from slime_core.plugins.commands import Parser

    parser = Parser(prog="slime", allow_abbrev=False)
    command.add_parser(parser.add_subparsers(dest="command", required=True))
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(f"slime {argv[0]}: unrecognized arguments: {' '.join(unknown)}")
    return int(command.run(namespace))


def overview(argv: Sequence[str] = ()) -> str:
    """Return the text that `slime --help` prints."""
    from slime_core.plugins.commands import offered

    rows = [*offered(argv), ("plugins", "version", "print the version")]
    width = max(len(name) for _, name, _ in rows)
    lines = [
        "usage: slime <command> [arguments]",
        "",
        "Reinforcement-learning post-training of language models, extended by plugins.",
    ]
    for title, members in groupby(rows, key=lambda row: row[0]):
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {text}" for _, name, text in members)]
    lines += ["", "`slime <command> --help` explains one command; `slime train --help-all` lists every setting."]
    return "\n".join(lines)
