"""argparse whose complaints look like all others of slime, for slime's own settings and for other programs' flags.

A program's parser says what its flags may be wherever they are given: the text of a command line, YAML's values and
variables are all read by it (`FlagParser.read`), and `words` is the way back.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from slime_core.errors import ConfigError, did_you_mean


class OnlyGiven(argparse.Namespace):
    """What a command line gives and no default: argparse leaves out those of attributes that are there already."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class Switch(argparse.Action):
    """A flag without a value: stores true, or false when it is spelled with a name in `off`."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, off: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__([*option_strings, *off], dest, nargs=0, **kwargs)
        self.off = tuple(off)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store it."""
        setattr(namespace, self.dest, option_string not in self.off)


class OneOrMore(argparse.Action):
    """Of `nargs="+"`: stores one value as it is, and several as a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store it."""
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


class FlagParser(argparse.ArgumentParser):
    """The flags of one program, each beginning with `--`; a wrong one ends in a ConfigError that begins with its name.

    Flags without a value are `store_true`, BooleanOptionalAction or `Switch`. The `dest` of a flag is its attribute on
    `args`, its `default` the program's own, for the help text alone. Types and choices are argparse's.
    """

    def __init__(self, version: str, **kwargs: Any) -> None:
        """Take argparse's settings, too.

        Args:
            version: For messages, such as "SGLang 0.5.20".
            kwargs: `allow_abbrev=True`: on the command line the beginning of a name may stand for it.
        """
        super().__init__(prog=version, add_help=False, **{"allow_abbrev": False} | kwargs)
        self._negative_number_matcher = re.compile(r"^-\.?\d")  # argparse's own does not know -1e-5

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of exiting."""
        match = re.match(r"argument ([^:]+): (.*)", message, re.DOTALL)
        raise ConfigError(f"{match[1].split('/')[0]} (flag): {match[2]}" if match else message)

    @property
    def flags(self) -> list[argparse.Action]:
        """Each of them, in the order in which they were added."""
        return self._actions

    @property
    def option_strings(self) -> list[str]:
        """Every name of every flag."""
        return list(self._option_string_actions)

    @cached_property
    def by_name(self) -> Mapping[str, argparse.Action]:
        """Every attribute and every name with underscores -> flag."""
        names = {option[2:].replace("-", "_"): flag for flag in self.flags for option in flag.option_strings}
        return {flag.dest: flag for flag in self.flags} | names

    def read(self, name: str, value: Any, named: str, known: Iterable[str] = ()) -> tuple[str, Any]:
        """(Attribute, typed value) of what a file or a variable says; None stays None.

        Args:
            name: A key of `by_name`.
            value: As YAML has it, or the text of a variable.
            named: How messages call the setting, `run.yaml:3: sglang_x`.
            known: Names among which the one that was meant is looked for, those of `by_name` by default.

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
        """That the program has no such flag, and which one of `known` was meant."""
        return f"{named}: {self.prog} has no such flag.{did_you_mean(word, known or self.by_name)}"


def off_names(flag: argparse.Action) -> Sequence[str]:
    """The names that store false."""
    if isinstance(flag, argparse.BooleanOptionalAction):
        return [name for name in flag.option_strings if name.startswith("--no-")]
    return flag.off if isinstance(flag, Switch) else ()


def as_json(text: str) -> Any:
    """Type of a flag that takes JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None


def takes_list(flag: argparse.Action) -> bool:
    """Whether its value is a list, or may be."""
    return flag.nargs in ("*", "+") or isinstance(flag.nargs, int)


def words(flag: argparse.Action, value: Any) -> list[str]:
    """What to type for a value. Raises ValueError where it cannot be typed."""
    name = flag.option_strings[0]
    if flag.nargs == 0:
        if not value and not off_names(flag):
            raise ValueError("false cannot be said on its command line, only true; remove it")
        return [name if value else off_names(flag)[0]]
    if takes_list(flag) and not (isinstance(flag, OneOrMore) and isinstance(value, str)):
        return [name, *(_text(flag, item) for item in _items(value))]
    if flag.nargs == "?" and (value is True or value == flag.const):
        return [name]
    if isinstance(value, list) and flag.type is not as_json:
        raise ValueError("expected one value, not a list")
    text = _text(flag, value)
    # argparse takes a word that begins with a dash for a flag.
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def _items(value: Any) -> list[Any]:
    if not isinstance(value, str):
        return list(value) if isinstance(value, list | tuple) else [value]
    if not value.lstrip().startswith("["):
        return value.split()
    items = json.loads(value)
    assert isinstance(items, list)
    return items


def _text(flag: argparse.Action, value: Any) -> str:
    """One word; a mapping becomes JSON, since options that are text may hold it."""
    if isinstance(value, dict) or (flag.type is as_json and not isinstance(value, str)):
        return json.dumps(value, separators=(",", ":"))
    if isinstance(value, bool):
        raise ValueError("expected a value, not true or false")
    if isinstance(value, float) and value.is_integer() and flag.type is int:
        return str(int(value))  # 1e3 in YAML
    return str(value)


def truth(value: Any) -> bool:
    """A boolean, or the text of one. Raises ValueError."""
    found = {"true": True, "false": False}.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise ValueError("expected true or false")
    return found
