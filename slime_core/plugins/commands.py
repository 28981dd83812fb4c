"""Commands of plugins: the list of them, without importing any, and the one that is chosen.

They are components like all others (kind `commands`), so what leaves plugins out leaves them out, too. Installed
distributions are looked at only when the word is none of the core's, or for the list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.distributions import BUNDLE, installed
from slime_core.errors import ConfigError, SlimeError
from slime_core.plugins.allow import enter_safe_mode
from slime_core.plugins.discovery import discovered
from slime_core.plugins.kinds import KINDS
from slime_core.plugins.registry import ComponentRef

if TYPE_CHECKING:
    from slime_core.protocols import Command

KIND = "commands"


def load(argv: Sequence[str], core: Sequence[str]) -> Command:
    """The command of the first word: its name, or `distribution:name`.

    Args:
        argv: The command line.
        core: Names of the core's commands, for the message.

    Raises:
        ConfigError: There is no such command.
        PluginError: It is left out by what the user typed, two distributions offer it, or it cannot be loaded.
    """
    from slime_core.plugins.manager import current_registry
    from slime_core.plugins.resolve import resolve

    _obey(argv)
    registry = current_registry()
    distribution, colon, shown = argv[0].rpartition(":")
    name = shown.replace("-", "_")
    if not any(ref.kind == KIND and ref.name == name for ref in [*registry, *registry.left_out]):
        raise ConfigError(_unknown(argv[0], [*core, *(_typed(name) for name in registry.names(KIND)), "version"]))
    command: Command = resolve(KIND, f"{distribution}{colon}{name}", origin=f"slime {argv[0]}").obj
    return command


def offered(argv: Sequence[str], core: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """(What to type, help) of every command of a plugin, and what stops the list, in words.

    A name that the core or another distribution has, too, is typed with its distribution.
    """
    try:
        _obey(argv)
        registry = discovered(KINDS[KIND].group)
    except SlimeError as error:
        return [], [f"Commands of plugins are not known: {error}"]
    rows = []
    for name in registry.names(KIND):
        refs = registry.offers(KIND, name)
        for ref in refs:
            taken = len(refs) > 1 or _typed(name) in core
            rows.append((f"{ref.distribution}:{_typed(name)}" if taken else _typed(name), help_line(ref)))
    return rows, []


def help_line(ref: ComponentRef) -> str:
    """What the list says of a command: its module's word, or why there is none."""
    try:
        return first_line(_source(ref).read_bytes()) or f"of {ref.origin}"
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        return f"not usable ({ref.origin}): {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def first_line(source: bytes) -> str:
    """Of a module's docstring, without "`slime NAME`: ". Raises SyntaxError, ValueError."""
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return re.sub(r"^`slime [^`]*`: ", "", first).rstrip(".")


def _obey(argv: Sequence[str]) -> None:
    """`--no-plugins` counts for commands, too."""
    if "--no-plugins" in argv:
        enter_safe_mode()


def _source(ref: ComponentRef) -> Path:
    """The file of a command's module, found without importing its packages. Raises ImportError, ValueError."""
    first, *rest = ref.target.partition(":")[0].strip().split(".")
    folders = None if ref.folder is None else [str(ref.folder / "src"), str(ref.folder)]
    spec: ModuleSpec | None = find_spec(first) if folders is None else PathFinder.find_spec(first, folders)
    for part in rest:
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ())) if spec else None
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module {ref.target.partition(':')[0]!r}")
    return Path(spec.origin)


def _typed(name: str) -> str:
    """A registered name as one types it."""
    return name.replace("_", "-")


def _unknown(word: str, names: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, names, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"Commands: {', '.join(names)}."
    more = "" if installed(BUNDLE) else f" slime's own beyond the core come with: pip install {BUNDLE}"
    return f"unknown command {word!r}. {hint}{more}"
