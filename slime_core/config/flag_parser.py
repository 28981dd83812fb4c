"""An argparse parser with slime's error messages, for slime's own settings and for other programs' flags.

One parser reads a program's flags from all sources: the command line, YAML values and environment variables
(`FlagParser.read`). `words` does the reverse: it turns a value into command-line words.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from slime_core.errors import ConfigError, did_you_mean


class OnlyGiven(argparse.Namespace):
    """A namespace without defaults: argparse sets no default for an attribute that exists already."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class Switch(argparse.Action):
    """A flag without a value. It stores true, or false if it is given under a name in `off`."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, off: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__([*option_strings, *off], dest, nargs=0, **kwargs)
        self.off = tuple(off)

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Store true or false."""
        setattr(namespace, self.dest, option_string not in self.off)


class OneOrMore(argparse.Action):
    """The action of a flag with `nargs="+"`. It stores a single value as it is, and several values as a list."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Store the value or the list."""
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


class _HelpFormatter(argparse.HelpFormatter):
    """Print a flag's names once, the type of its value, and its default unless the text names it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        off = off_names(action)
        names = ", ".join([*(name for name in action.option_strings if name not in off), *off[:1]])
        return f"{names} {self._format_args(action, self._get_default_metavar_for_optional(action))}".rstrip()

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        words: Mapping[object, str] = {int: "N", float: "X", as_json: "JSON"}
        return words.get(action.type, "TEXT")

    def _get_help_string(self, action: argparse.Action) -> str:
        text, value = action.help or "", action.default
        if value in (None, [], {}, argparse.SUPPRESS) or value is False or "default" in text.lower():
            return text
        shown = " ".join(map(str, value)) if isinstance(value, list) else "on" if value is True else str(value)
        return f"{text} (default: {shown.replace('%', '%%')})"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class FlagParser(argparse.ArgumentParser):
    """The flags of one program, each beginning with `--`. A wrong flag raises a ConfigError that begins with its name.

    Flags without a value are `store_true`, BooleanOptionalAction or `Switch`. The `dest` of a flag is its attribute on
    `args`, its `default` the program's own, for the help text alone. Types and choices are argparse's.
    """

    def __init__(self, version: str, **kwargs: Any) -> None:
        """Create the parser; `kwargs` are passed to argparse.

        Args:
            version: For messages, such as "SGLang 0.5.20".
            kwargs: Settings of argparse. With `allow_abbrev=True` the command line may abbreviate names.
        """
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(prog=version, add_help=False, formatter_class=_HelpFormatter, **kwargs)
        self._negative_number_matcher = re.compile(r"^-\.?\d")  # argparse does not parse -1e-5 as a number

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of exiting."""
        match = re.match(r"argument ([^:]+): (.*)", message, re.DOTALL)
        raise ConfigError(f"{match[1].split('/')[0]} (flag): {match[2]}" if match else message)

    @property
    def flags(self) -> list[argparse.Action]:
        """Flags in the order in which they were added."""
        return self._actions

    @property
    def option_strings(self) -> list[str]:
        """Names of all flags."""
        return list(self._option_string_actions)

    @cached_property
    def by_name(self) -> Mapping[str, argparse.Action]:
        """Mapping from attributes and from names with underscores to flags."""
        names = {option[2:].replace("-", "_"): flag for flag in self.flags for option in flag.option_strings}
        return {flag.dest: flag for flag in self.flags} | names

    def page(self, topics: Mapping[str, Iterable[argparse.Action]], usage: str | None = None) -> str:
        """Return the help of some flags by topic, after `usage` and the parser's description if a usage is given."""
        formatter = self._get_formatter()
        if usage is not None:
            formatter.add_usage(usage, [], [])
            formatter.add_text(self.description)
        for title, flags in topics.items():
            formatter.start_section(title)
            formatter.add_arguments(flags)
            formatter.end_section()
        return formatter.format_help()

    def read(self, name: str, value: object, named: str, known: Iterable[str] = ()) -> tuple[str, object]:
        """Return (attribute, typed value) for a value from a file or a variable; None stays None.

        Args:
            name: A key of `by_name`.
            value: Value read from YAML, or the text of a variable.
            named: Name of the setting in messages, such as `run.yaml:3: sglang_x`.
            known: Names to suggest for an unknown name; the keys of `by_name` by default.

        Raises:
            ConfigError: There is no such flag, or the value does not fit.
        """
        if name not in self.by_name:
            raise ConfigError(self.unknown(named, name, known))
        flag = self.by_name[name]
        try:
            if value is None:
                return flag.dest, None
            if flag.nargs == 0:
                return flag.dest, truth(value) != (f"--{name.replace('_', '-')}" in off_names(flag))
            typed = getattr(self.parse_args(words(flag, value), OnlyGiven()), flag.dest)
            return flag.dest, [typed] if isinstance(value, list) and not isinstance(typed, list) else typed
        except ConfigError as error:
            raise ConfigError(f"{named} {value!r}: {str(error).partition(': ')[2]}") from None
        except ValueError as error:
            raise ConfigError(f"{named} {value!r}: {error}") from None

    def unknown(self, named: str, word: str, known: Iterable[str] = ()) -> str:
        """Return the message for an unknown flag, with the closest name of `known` as a suggestion."""
        return f"{named}: {self.prog} has no such flag.{did_you_mean(word, known or self.by_name)}"


def off_names(flag: argparse.Action) -> Sequence[str]:
    """Return the names of a flag that store false."""
    if isinstance(flag, argparse.BooleanOptionalAction):
        return [name for name in flag.option_strings if name.startswith("--no-")]
    return flag.off if isinstance(flag, Switch) else ()


def as_json(text: str) -> object:
    """Parse JSON; used as the `type` of a flag."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not valid JSON: {error}") from None


def takes_list(flag: argparse.Action) -> bool:
    """Return whether the value of a flag is a list, or may be."""
    return flag.nargs in ("*", "+") or isinstance(flag.nargs, int)


def words(flag: argparse.Action, value: object) -> list[str]:
    """Return the command-line words that give a flag this value. Raises ValueError if no words do."""
    name = flag.option_strings[0]
    if flag.nargs == 0:
        if not value and not off_names(flag):
            raise ValueError("this flag can only be set to true; remove it")
        return [name if value else off_names(flag)[0]]
    if takes_list(flag) and not (isinstance(flag, OneOrMore) and isinstance(value, str)):
        return [name, *(_text(flag, item) for item in _items(value))]
    if flag.nargs == "?" and (value is True or value == flag.const):
        return [name]
    if isinstance(value, list) and flag.type is not as_json:
        raise ValueError("expected one value, not a list")
    text = _text(flag, value)
    # argparse reads a word that begins with a dash as a flag.
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def _items(value: object) -> Sequence[object]:
    if not isinstance(value, str):
        return list(value) if isinstance(value, list | tuple) else [value]
    if not value.lstrip().startswith("["):
        return value.split()
    items = json.loads(value)
    assert isinstance(items, list)
    return items


def _text(flag: argparse.Action, value: object) -> str:
    """Return one word for a value. A mapping becomes JSON, because a text option may hold JSON."""
    if isinstance(value, dict) or (flag.type is as_json and not isinstance(value, str)):
        return json.dumps(value, separators=(",", ":"))
    if isinstance(value, bool):
        raise ValueError("expected a value, not true or false")
    if isinstance(value, float) and value.is_integer() and flag.type is int:
        return str(int(value))  # 1e3 in YAML
    return str(value)


def truth(value: object) -> bool:
    """Return the boolean, or parse its text. Raises ValueError."""
    found = {"true": True, "false": False}.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise ValueError("expected true or false")
    return found
