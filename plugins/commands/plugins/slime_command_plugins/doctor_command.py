"""what is wrong with the plugins installed here: `slime plugins doctor`"""

from __future__ import annotations

from typing import Any

from slime_command_plugins import command as plugins
from slime_core.protocols import Command


def add_parser(subparsers: Any) -> None:
    """Define `slime doctor`."""
    plugins.add_command(subparsers, "doctor").set_defaults(plugins_command="doctor")


command = Command(plugins.run, add_parser, only_prints=True)
