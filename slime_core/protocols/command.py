"""Commands of `slime`, in the core and in plugins (entry-point group `slime.commands`), and what checks report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True)
class Command:
    """A sub-command: `slime NAME ...`.

    `slime --help` shows the first line of the docstring of the entry point's module. The line is read without importing
    the module.
    """

    run: Callable[[Any], int]
    """Function that runs the command and returns the exit status.

    It takes every word after the name, or with `add_parser` the parsed namespace.
    """
    add_parser: Callable[[argparse._SubParsersAction[Any]], None] | None = None
    """Function that adds the command's parser under its name; None for a command that takes a run's settings."""
    only_prints: bool = False
    """True if the exit status is 0 when the reader of the output closes it early (`| head`)."""


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    subject: str
    """Subject of the check: "components", "data", ..."""
    level: Level
    message: str
