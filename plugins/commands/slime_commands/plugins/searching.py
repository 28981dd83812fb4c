"""`slime plugins search`: the plugins that a package index has, by the start of their names and their keyword."""

from __future__ import annotations

import argparse
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from slime_commands.plugins.packages import KEYWORD, PREFIX, PYPI, PackageIndex, Release, index, unmet
from slime_core.distributions import installed
from slime_core.errors import ConfigError, PluginError
from slime_core.text import json_text, plain, table

_DEADLINE_S = 60.0
_AT_A_TIME = 8
_HEADER = ("NAME", "VERSION", "HERE", "DESCRIPTION")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    text = f"words that the name or the description has; whole names ({PREFIX}...) are read without the list of names"
    parser.add_argument("words", nargs="*", metavar="WORD", help=text)
    add_index_url(parser)
    parser.add_argument(
        "--timeout", type=float, default=_DEADLINE_S, metavar="S", help="seconds for all (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_index_url(parser: argparse.ArgumentParser) -> None:
    """Add `--index-url`."""
    parser.add_argument(
        "--index-url", metavar="URL", help=f"package index (default: that of pip's settings, or {PYPI})"
    )


def run(namespace: argparse.Namespace) -> int:
    """Print the plugins; exit status 1 if a project could not be read."""
    if not 0 < namespace.timeout < threading.TIMEOUT_MAX:
        raise ConfigError(f"slime plugins search: --timeout {namespace.timeout:g} must be seconds, more than 0")
    where = index(namespace.index_url, namespace.timeout)
    words = [word.lower() for word in namespace.words]
    named = bool(words) and all(word.startswith(PREFIX) for word in words)
    chosen, unread = _plugins(where, words) if named else ([], {})
    if not chosen:  # the words are parts of names or descriptions
        found, unread = _plugins(where, None)
        chosen = [one for one in found if all(word in f"{one.name} {one.summary}".lower() for word in words)]
    if namespace.json:
        rows = [{**asdict(one), "installed": _here(one.name), "unmet": unmet(one)} for one in chosen]
        print(json_text(rows, indent=2))
    elif chosen:
        rows_of_text = [(one.name, one.version, _here(one.name) or "-", plain(_described(one))) for one in chosen]
        print("\n".join(table([_HEADER, *rows_of_text])))
    else:
        of = f" with {' '.join(namespace.words)}" if words else ""
        print(f"{where.url} has no plugin{of}: none named {PREFIX}... with the keyword {KEYWORD}")
    for name, reason in unread.items():
        print(f"not read: {name}: {reason}", file=sys.stderr)
    return int(bool(unread))


def _plugins(where: PackageIndex, names: list[str] | None) -> tuple[list[Release], dict[str, str]]:
    """Return the releases with the keyword, and project -> error for those that could not be read.

    Args:
        names: Projects to read; None for all that the index lists.
    """
    if names is None:
        hint = f"a whole name ({PREFIX}...) is read without it"
        names = where.names(lambda text: print(f"slime: {text}; {hint}", file=sys.stderr, flush=True))
    unread: dict[str, str] = {}

    def newest(name: str) -> Release | None:
        try:
            return where.newest(name)
        except PluginError as error:
            unread[name] = str(error)
            return None

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        found = [one for one in pool.map(newest, names) if one is not None]
    return [one for one in found if KEYWORD in one.keywords], unread


def _here(name: str) -> str | None:
    dist = installed(name)
    return dist.version if dist else None


def _described(release: Release) -> str:
    needed = unmet(release)
    return f"{release.summary} (needs {needed})" if needed else release.summary
