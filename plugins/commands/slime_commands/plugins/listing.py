"""`slime plugins list`: a table from metadata and first docstring lines; `--check` loads what it lists."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from textwrap import shorten
from typing import Any

from slime_commands.plugins.naming import kind_word, origin, registered_kind
from slime_core.errors import PluginConflictError, PluginError
from slime_core.plugins.commands import help_line
from slime_core.plugins.kinds import HOOK_GROUP, KINDS
from slime_core.plugins.registry import ComponentRef, Registry
from slime_core.text import json_text

_HEADER = ("KIND", "NAME", "FROM", "DESCRIPTION")
_WIDTH = 80
"""Characters of a description."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--kind", help=f"only this kind: {', '.join(KINDS)}, hooks")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="load everything; exit status 1 when something is wrong")


def run(namespace: argparse.Namespace) -> int:
    """Print the table; what is wrong goes to standard error."""
    from slime_core.plugins.manager import current_registry
    from slime_core.text import table

    registry = current_registry()
    wanted = registered_kind(namespace.kind) if namespace.kind else None
    refs = [ref for ref in registry if wanted in (None, ref.kind)]
    wrong = _check(registry, refs) if namespace.check else []
    if namespace.json:
        print(json_text([_facts(ref) for ref in refs], indent=2))
    else:
        rows = [(kind_word(ref), ref.name, origin(ref), _description(ref)) for ref in refs]
        for before, row, line in zip([None, None, *rows], [None, *rows], table([_HEADER, *rows])):
            if before and row and before[0] != row[0]:
                print()  # between kinds
            print(line)
    left_out = sorted({ref.distribution for ref in registry.left_out})
    if left_out:
        print(f"left out by {registry.allow.set_by}: {', '.join(left_out)}", file=sys.stderr)
    for problem in registry.problems:
        print(f"not usable: {problem.where}: {problem.message}", file=sys.stderr)
    for message in wrong:
        print(f"not usable: {message}", file=sys.stderr)
    return int(namespace.check and bool(wrong or registry.problems))


def _description(ref: ComponentRef) -> str:
    """The first line of its module's docstring, read without importing the module."""
    if ref.registered is not None or ref.target.startswith("/"):
        return ref.target
    _, text = help_line(ref.target, ref.distribution, [str(ref.folder)] if ref.folder else None)
    return shorten(text, _WIDTH, placeholder=" ...")


def _check(registry: Registry, refs: Iterable[ComponentRef]) -> list[str]:
    """Return the errors that would stop a run which selects one of `refs`."""
    from slime_core.plugins.manager import build_manager
    from slime_core.plugins.resolve import resolve

    wrong = []
    for ref in refs:
        try:
            registry.get(ref.kind, ref.name)
        except PluginConflictError as error:
            wrong.append(str(error))
    for ref in refs:
        if ref.kind == HOOK_GROUP:
            continue
        spec = f"{ref.distribution}:{ref.name}" if ref.distribution else ref.name
        try:
            resolve(ref.kind, spec, registry=registry)
        except PluginError as error:
            wrong.append(str(error))
    try:
        build_manager()
    except PluginError as error:
        wrong.append(str(error))
    return list(dict.fromkeys(wrong))


def _facts(ref: ComponentRef) -> dict[str, Any]:
    return {
        "kind": ref.kind,
        "name": ref.name,
        "distribution": ref.distribution,
        "version": ref.version,
        "folder": str(ref.folder) if ref.folder else None,
        "target": ref.target,
        "requires": list(ref.requires),
    }
