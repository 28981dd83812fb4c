"""What a command of `slime` is, the core's and those of plugins alike (entry-point group `slime.commands`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True)
class Command:
    """One sub-command: `slime NAME ...`.

    The first line of the docstring of the module that an entry point names is the command's line in `slime --help`. It
    is read without importing the module.
    """

    run: Callable[[Any], int]
    """Does it and returns the exit status. Gets every word after the name; with `add_parser` the parsed namespace."""
    add_parser: Callable[[argparse._SubParsersAction[Any]], None] | None = None
    """Adds the command's parser, under its name; None for a command that takes a run's settings."""
    only_prints: bool = False
    """A reader of its output that leaves early (`| head`) has what it wanted: exit status 0."""
