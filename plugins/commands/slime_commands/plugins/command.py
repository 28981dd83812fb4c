"""`slime plugins`: list, make, check, find and install plugins.

Each sub-command is a module with `add_parser` and `run`, imported when it is chosen. `list` reads metadata and imports
no plugin, so it answers at once and cannot be broken by one; the others load what they are asked about.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from slime_core.protocols import Command

_COMMANDS = {
    "list": ("listing", "every installed component; imports none of them"),
    "show": ("showing", "one component: signature, options, documentation, where it comes from"),
    "new": ("making", "write a plugin distribution that installs and passes its tests"),
    "check": ("checking", "load, signature, version, options and contract; exit status 1 when something fails"),
    "search": ("searching", "plugins on a package index: names that begin with slime-, keyword slime-plugin"),
    "install": ("installing", "install plugins by pip of this interpreter, and check them; others are refused"),
    "uninstall": ("uninstalling", "uninstall plugins by pip of this interpreter; others are refused"),
    "trace": ("tracing", "run a command and report which plugin answered for what"),
}
"""Sub-command -> module, help."""


def add_parser(subparsers: Any) -> None:
    """Define `slime plugins` and its sub-commands."""
    parser = subparsers.add_parser("plugins", help="list, make, check, find and install plugins")
    commands = parser.add_subparsers(dest="plugins_command", required=True, metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        import_module(f"{__package__}.{module}").add_arguments(command)
        if name == "trace":  # whose settings are those of the command it runs
            command.set_defaults(plugin_dir=(), no_plugins=False)
        else:
            command.add_argument("--plugin-dir", action="append", default=[], metavar="DIR", help="also look here")
            command.add_argument("--no-plugins", action="store_true", help="safe mode: slime's own plugins only")


def run(namespace: argparse.Namespace) -> int:
    """Run the sub-command; its exit status."""
    from slime_core.distributions import enter_safe_mode
    from slime_core.plugins.discovery import add_plugin_directories

    if namespace.no_plugins:
        enter_safe_mode()
    add_plugin_directories(namespace.plugin_dir)
    module, _ = _COMMANDS[namespace.plugins_command]
    return int(import_module(f"{__package__}.{module}").run(namespace))


command = Command(run, add_parser, only_prints=True)
