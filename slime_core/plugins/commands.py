"""Commands: list them without importing any, and load the chosen command.

Commands are components like all others (kind `commands`), so options that leave plugins out leave commands out, too.
The list has the commands of installed distributions.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slime_core.distributions import BUNDLE, CORE, AllowList, enter_safe_mode, entry_points, installed, is_own
from slime_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from slime_core.protocols import Command

KIND = "commands"
_GROUPS = ("train", "data", "look at a run", "serve", "plugins")
"""Groups of `slime --help`. A command is in the one that its docstring names: "`slime NAME` (GROUP): ..."."""


def load(argv: Sequence[str]) -> Command:
    """Load the command that the first word names: `name` or `distribution:name`.

    Raises:
        ConfigError: There is no such command.
        PluginError: The user's options leave it out, two distributions offer it, or it cannot be loaded.
    """
    from slime_core.plugins.manager import current_registry
    from slime_core.plugins.resolve import resolve

    if "--no-plugins" in argv:
        enter_safe_mode()
    registry = current_registry()
    distribution, _, shown = argv[0].rpartition(":")
    name = shown.replace("-", "_")
    offers = [ref for ref in [*registry, *registry.left_out] if (ref.kind, ref.name) == (KIND, name)]
    if not offers:
        raise ConfigError(_unknown(argv[0], [*map(_typed, registry.names(KIND)), "version"]))
    distribution = distribution or next((ref.distribution for ref in offers if is_own(ref.distribution)), "")
    colon = ":" if distribution else ""
    command: Command = resolve(KIND, f"{distribution}{colon}{name}", origin=f"slime {argv[0]}").obj
    return command


def offered(argv: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return (group, typed name, help) of every command of an installed distribution, without importing them.

    In a group, the core's commands come first, the others follow by name. A name that slime or another distribution
    has, too, is typed with its distribution.
    """
    found: dict[tuple[str, str], tuple[str, tuple[str, str]]] = {}
    for name, entry, distribution in entry_points(f"slime.{KIND}", AllowList.of(argv)):
        found.setdefault((_typed(name), entry.value), (distribution, help_line(entry.value, distribution)))
    names = [name for name, _ in found]
    rows = []
    for (name, _), (distribution, (group, text)) in found.items():
        typed = name if names.count(name) == 1 or is_own(distribution) else f"{distribution}:{name}"
        rows.append((_GROUPS.index(group), distribution != CORE, typed, text))
    return [(_GROUPS[group], typed, text) for group, _, typed, text in sorted(rows)]


def help_line(target: str, distribution: str, path: Sequence[str] | None = None) -> tuple[str, str]:
    """Return the group and the first line of a component's module, or the error; `path` replaces sys.path."""
    try:
        group, text = first_line(_source(target, path).read_bytes())
        return group, text or f"of {distribution}"
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        said = f"not usable ({distribution}): {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return _GROUPS[-1], said


def first_line(source: bytes) -> tuple[str, str]:
    """Return the group and the text of a docstring "`slime NAME` (GROUP): text". Raises SyntaxError, ValueError."""
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].rstrip(".")
    title = re.match(r"`slime [^`]*`(?: \((.*?)\))?: ", first)
    group = title[1] if title and title[1] in _GROUPS else _GROUPS[-1]
    return group, first[title.end() if title else 0 :]


def _source(target: str, path: Sequence[str] | None = None) -> Path:
    """Find a module's file on `path` or sys.path without importing it. Raises ImportError, ValueError."""
    name = target.partition(":")[0].strip()
    first, *rest = name.split(".")
    spec = PathFinder.find_spec(first, path) if path else find_spec(first)
    for part in rest:
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ())) if spec else None
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module {name!r}")
    return Path(spec.origin)


def _typed(name: str) -> str:
    """Return a registered name as it is typed."""
    return name.replace("_", "-")


_INSTEAD = {
    "resume": " To resume a run: slime train --config RUN/config.yaml --load RUN.",
    "continue": " To resume a run: slime train --config RUN/config.yaml --load RUN.",
    "finetune": " slime sft trains on answers, slime train on rewards.",
    "merge": " Checkpoints of a run with LoRA are merged already; slime export writes one in another format.",
}
"""Words that are no command -> hint that names the right command."""


def _unknown(word: str, names: Sequence[str]) -> str:
    hint = _INSTEAD.get(word) or did_you_mean(word, names) or f" Commands: {', '.join(names)}."
    more = "" if installed(BUNDLE) else f" slime's own beyond the core come with: pip install {BUNDLE}"
    return f"unknown command {word!r}.{hint}{more}"


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError, beginning with the command's name, instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, with the choice that was probably meant."""
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong:
            choices = [word.strip(" '") for word in wrong[2].split(",")]
            meant = did_you_mean(wrong[1], choices)
            message += f".{meant}" if meant else ""
        raise ConfigError(f"{self.prog}: {message}")
