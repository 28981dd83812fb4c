"""The schema -> argparse, and a command line -> entries.

Every setting is a kebab-case flag in the group of its section, with the attribute's docstring as help. No
abbreviations: an unknown flag is an error with a suggestion. Strings stay strings here; typing is pydantic's job, so
that flags, environment and YAML share one set of rules.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from slime_core.config.foreign import Given
from slime_core.config.origins import FLAG, Entry
from slime_core.config.passthrough import ForeignFlag, ForeignFlags, find_foreign
from slime_core.config.spec import FlagSpec, did_you_mean, flag_specs
from slime_core.errors import ConfigError

_HELP_HEAD = (
    "Settings come from defaults, then --config files, then SLIME_<NAME> environment variables, then flags;"
    " later ones win. `slime config show` prints each value with its origin. Options of plugins are listed at the end,"
    " for the components that the other flags select."
)
_FOREIGN = "foreign "
"""Prefix of argparse destinations of pass-through flags; no attribute has a space."""


class _Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        match = re.match(r"argument ([^:]+): (.*)", message)
        raise ConfigError(f"{match[1].split('/')[0]}: {match[2]}" if match else message)


@dataclass
class ParsedFlags:
    """What one command line says."""

    values: dict[str, Entry] = field(default_factory=dict)
    foreign: list[Given] = field(default_factory=list)
    """Pass-through flags, still as words."""
    sets: list[str] = field(default_factory=list)
    """Texts after `--set`."""
    help_flag: str = ""
    """The flag that asks for another program's flags, when it is among them."""


class _ShortHelp(argparse.Action):
    """`--help`: the settings that people set with this command."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        from slime_core.config.help import short_help

        print(short_help(parser.prog))
        raise SystemExit(0)


class _Switch(argparse.Action):
    """A flag without a value: stores True, or False when spelled with its other name."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, off: str | None = None, **kwargs: Any) -> None:
        names = [*option_strings, off] if off else list(option_strings)
        super().__init__(names, dest, nargs=0, **kwargs)
        self.off = off

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string != self.off)


def _add_flag(group: Any, spec: FlagSpec) -> None:
    text = spec.help_with_default.replace("%", "%%")
    shape: dict[str, Any] = {"metavar": spec.metavar}
    if spec.kind == "bool" and not spec.is_list:
        shape = {"action": _Switch, "off": spec.off_flag}
    elif spec.spelling.append:
        shape |= {"action": "append"}
    elif spec.is_list:
        shape |= {"action": "extend", "nargs": "+"}
    options = [spec.flag, *(f"--{name}" for name in spec.spelling.also)]
    group.add_argument(*options, dest=spec.name, default=argparse.SUPPRESS, help=text, **shape)


def _foreign_shape(flag: ForeignFlag) -> dict[str, Any]:
    """How argparse reads another program's flag; values stay text."""
    if flag.kind == "switch":
        return {"action": "store_true"}
    if flag.kind == "toggle":
        return {"action": argparse.BooleanOptionalAction}
    metavar = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else flag.kind.upper()
    if flag.is_list:
        return {"nargs": flag.count or ("*" if flag.may_be_empty else "+"), "metavar": metavar}
    return {"nargs": "?", "const": flag.const, "metavar": metavar} if flag.may_be_empty else {"metavar": metavar}


def build_parser(foreign: Sequence[ForeignFlags], *, prog: str = "slime train") -> argparse.ArgumentParser:
    """The parser of every command that takes the run's settings."""
    usage = f"{prog} [--config FILE] [flags]"
    parser = _Parser(prog=prog, usage=usage, description=_HELP_HEAD, allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", action=_ShortHelp, nargs=0, default=argparse.SUPPRESS, help="the first page")
    parser.add_argument("--help-all", action="help", help="list every setting")
    groups: dict[str, Any] = {}
    for spec in flag_specs().values():
        if spec.section not in groups:
            groups[spec.section] = parser.add_argument_group(spec.section)
        _add_flag(groups[spec.section], spec)
    groups["Run"].add_argument(
        "--set",
        dest="set",
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME.KEY=VALUE",
        help="Set one entry of a mapping, e.g. plugins.math.tolerance=1e-6; repeatable.",
    )
    for owner in foreign:
        names = [f"--{f.name}" for f in owner.flags] + [f"--{p}*" for p in owner.prefixes]
        names += [*(f"--{name}" for name in owner.examples), "..."] if owner.examples else []
        names += [f"(--{owner.help_flag} lists them)"] if owner.help_flag else []
        users = ", ".join(owner.used_by) or "none in this version"
        group = parser.add_argument_group(f"{owner.owner} (taken by: {users})", " ".join(names))
        for flag in owner.flags:
            text = flag.help.replace("%", "%%") or argparse.SUPPRESS
            options = [f"--{name}" for name in flag.names]
            dest = _FOREIGN + flag.attribute
            group.add_argument(*options, dest=dest, default=argparse.SUPPRESS, help=text, **_foreign_shape(flag))
    for help_flag in dict.fromkeys(owner.help_flag for owner in foreign if owner.help_flag):
        groups["Run"].add_argument(
            f"--{help_flag}",
            dest="help_flag",
            action="store_const",
            const=help_flag,
            default=argparse.SUPPRESS,
            help="List the flags of " + " and ".join(o.owner for o in foreign if o.help_flag == help_flag) + ".",
        )
    return parser


def _is_flag(token: str) -> bool:
    return token.startswith("-") and len(token) > 1 and not re.match(r"^-\.?\d", token)


def _is_open(token: str, foreign: Sequence[ForeignFlags], options: Collection[str]) -> bool:
    """Whether a token is a flag of somebody else's that the parser, which has `options`, does not know."""
    flag = token.partition("=")[0]
    attribute = flag[2:].replace("-", "_")
    if not flag.startswith("--") or "_" in flag or flag in options or attribute in flag_specs():
        return False
    return find_foreign(foreign, attribute) is not None


def _take_open_flags(
    argv: Sequence[str], foreign: Sequence[ForeignFlags], options: Collection[str]
) -> tuple[list[str], list[Given]]:
    """Split off the flags that the parser does not know: (the rest, those with their value tokens)."""
    rest: list[str] = []
    taken: list[Given] = []
    values: list[str] | None = None
    for token in argv:
        if _is_open(token, foreign, options):
            name, equals, inline = token[2:].partition("=")
            values = [inline] if equals else []
            taken.append(Given(name.replace("-", "_"), values, FLAG))
            if equals:
                values = None
        elif values is not None and not _is_flag(token):
            values.append(token)
        else:
            values = None
            rest.append(token)
    return rest, taken


def parse_flags(argv: Sequence[str], foreign: Sequence[ForeignFlags], *, prog: str = "slime train") -> ParsedFlags:
    """Read a command line. Raises ConfigError; prints help and raises SystemExit on `--help`, `--help-all`."""
    parser = build_parser(foreign, prog=prog)
    options = {option for action in parser._actions for option in action.option_strings}
    rest, opened = _take_open_flags(argv, foreign, options)
    namespace, unknown = parser.parse_known_args(rest)
    if unknown:
        listed = [f"--{name}" for o in foreign if o.has_open_names for flag in o.listed.flags for name in flag.names]
        raise ConfigError(_unknown_message(unknown[0], [*options, *listed], prog))
    parsed = ParsedFlags()
    for dest, value in vars(namespace).items():
        if dest == "set":
            parsed.sets = value
        elif dest == "help_flag":
            parsed.help_flag = value
        elif dest.startswith(_FOREIGN):
            parsed.foreign.append(Given(dest.removeprefix(_FOREIGN), value, FLAG))
        else:
            parsed.values[dest] = Entry(value, FLAG)
    parsed.foreign += opened
    return parsed


def _unknown_message(token: str, known: Sequence[str], prog: str) -> str:
    from slime_core.config.other_trainers import renamed

    theirs = renamed(token)
    if theirs:
        return f"unknown flag {token.partition('=')[0]}: {theirs}."
    if not token.startswith("-"):
        return f"unexpected argument {token!r}; every setting is a flag, see `{prog} --help-all`."
    word = token.partition("=")[0]
    own = f" `{prog} --help-all` lists all; keys of your own go into --custom-config-path."
    return f"unknown flag {word}.{did_you_mean(word, known) or own}"
