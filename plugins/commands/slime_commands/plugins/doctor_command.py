"""what is wrong with the plugins installed here (`slime plugins doctor`), or with a run: `slime doctor RUN`"""

from __future__ import annotations

import argparse
from typing import Any

from slime_commands.plugins import command as plugins
from slime_core.protocols import Command
from slime_core.text import json_text


def add_parser(subparsers: Any) -> None:
    """Define `slime doctor`."""
    parser = plugins.add_command(subparsers, "doctor")
    parser.add_argument("run", nargs="?", metavar="RUN", help="directory of a run to examine instead (its --run-dir)")
    parser.set_defaults(plugins_command="doctor")


def run(namespace: argparse.Namespace) -> int:
    """Examine the environment or the run; exit status 1 where something is wrong."""
    if namespace.run is None:
        return plugins.run(namespace)
    from slime_runs.inspect.learning import examine_run
    from slime_runs.run import Run

    from slime_core.errors import ConfigError
    from slime_core.text import plain

    if namespace.plugin_dir or namespace.no_plugins:
        raise ConfigError(
            "slime doctor RUN reads what a run has left and loads no plugin: drop --plugin-dir, --no-plugins"
        )
    text, wrong = examine_run(Run(namespace.run))
    if namespace.json:
        print(json_text({"run": namespace.run, "wrong": wrong, "lines": text.splitlines()}))
    else:
        print(plain(text))
    return int(wrong)


command = Command(run, add_parser, only_prints=True)
