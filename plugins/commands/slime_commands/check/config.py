"""`slime config` (train): show settings and where each comes from.

Loads no torch, unless the run names an estimator, whose own defaults count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError
from slime_core.plugins.commands import Parser
from slime_core.protocols import Command
from slime_core.secrets import hidden_values
from slime_core.text import json_text

if TYPE_CHECKING:
    from slime_core.config import Settings

COMMANDS = ("train", "sft", "eval", "rollout", "serve")

_HELP = """usage: slime config show [--for COMMAND] [--json] [--changed] [--config FILE] [flags]

Print every setting with its value and its origin: default, file:line, SLIME_<NAME> env, flag, derived, or
the default of a chosen component. A component that cannot be found or imported is an error after that.
The text is a configuration file: `--config` reads it back.

  --for COMMAND  also apply that command's requirements (train, sft, eval, rollout, serve)
  --changed      leave out defaults
  --json         one JSON object, {name: {"value": ..., "origin": ...}}

All other flags are settings; `slime train --help-all` lists them."""


def run(argv: list[str]) -> int:
    """Print settings. Raises ConfigError."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    if argv[0] != "show":
        raise ConfigError(f"slime config: unknown action {argv[0]!r}. Type: slime config show")
    return _show(argv[1:])


def _show(argv: list[str]) -> int:
    from slime_core.plugins.presets import load_settings

    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    parser = Parser(prog="slime config show", add_help=False, allow_abbrev=False)
    parser.add_argument("--for", dest="command", choices=COMMANDS, default="show")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--changed", action="store_true")
    own, rest = parser.parse_known_args(argv)
    settings = load_settings(rest, command=own.command, fetch=False)
    if own.json:
        print(json_text(as_json(settings, changed=own.changed), indent=2))
    else:
        print(settings.to_yaml(changed=own.changed), end="")
    _load_components(settings)
    return 0


def _load_components(settings: Settings) -> None:
    """Find and import what the given settings name, as the run would. Raises PluginError for the first that fails."""
    from slime_commands.check.plugin_help import named_components
    from slime_core.config.spec import flag_specs
    from slime_core.plugins.resolve import resolve

    for kind, spec, flag in named_components(settings):
        name = flag.removeprefix("--").replace("-", "_")
        if spec != flag_specs()[name].default:  # slime's own choice, or a word such as auto
            resolve(kind, spec, origin=f"{flag} ({settings.origins[name]})")


def as_json(settings: Settings, *, changed: bool = False) -> dict[str, Any]:
    """Setting -> value and origin."""
    return {
        name: {"value": hidden_values(getattr(settings.args, name)), "origin": str(origin)}
        for name, origin in settings.origins.items()
        if not (changed and origin.kind == "default")
    }


command = Command(run, only_prints=True)
