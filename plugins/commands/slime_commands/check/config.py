"""`slime config` (train): show settings and where each comes from.

Loads no torch, unless the run names an estimator, whose own defaults count.

The end of `slime train --help`: options of the plugins that the other flags and files on the command line select.

Other plugins are not imported, so help stays fast and an installed but broken plugin cannot break it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError, SlimeError
from slime_core.plugins.commands import Parser
from slime_core.protocols import Command
from slime_core.secrets import hidden_values
from slime_core.text import json_text, table

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


def print_options(argv: Sequence[str]) -> None:
    """Print a table per selected component that declares options, and the reason if a component cannot be loaded."""
    rest = [word for word in argv if word != "-h" and not re.match(r"--help(-|$)", word)]
    print("\nPlugin options:")
    lines = [line for rows in _tables(rest) for line in (table(rows) if isinstance(rows, list) else [rows])]
    hint = "name a component (--rm-type math) to see its options here; `slime plugins show rewards/math`"
    for line in lines or [hint]:
        print(f"  {line}")


def _tables(argv: Sequence[str]) -> Iterator[list[tuple[str, ...]] | str]:
    from slime_commands.plugins.option_rows import option_rows
    from slime_core.config import load_settings
    from slime_core.plugins.options import option_name, options_model
    from slime_core.plugins.resolve import resolve

    try:
        named = list(named_components(load_settings(argv, command="show")))
    except SlimeError as error:
        yield f"not known: {error}"
        return
    for kind, spec, flag in named:
        if spec == "auto":
            continue
        try:
            found = resolve(kind, spec, origin=flag)
        except SlimeError as error:
            yield f"not known: {error}"
            continue
        model, key = options_model(found.obj), option_name(found.ref)
        for row in option_rows(model) if model is not None else ():
            default = f"(default: {row.default})" if row.default else "(must be given)"
            yield [(f"--set plugins.{key}.{row.name}={row.type.upper()}", f"{row.help} {default}".strip())]


def named_components(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, spec, flag) for every component that a file, the environment or a flag names."""
    from slime_core.config.spec import flag_specs
    from slime_core.plugins.discovery import search_as
    from slime_core.plugins.kinds import flag_rows

    search_as(settings.args)
    for kind in flag_rows():
        for flag in kind.flags:
            name = flag.removeprefix("--").replace("-", "_")
            if name not in flag_specs() or not settings.is_given(name):
                continue
            named = getattr(settings.args, name)
            yield from ((kind.name, spec, flag) for spec in ([named] if isinstance(named, str) else named or []))
