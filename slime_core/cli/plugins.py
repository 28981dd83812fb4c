"""`slime plugins list|show`: what is installed, where it comes from, and how it is selected.

`list` reads metadata and imports no plugin, so it answers at once and cannot be broken by one; `list --check` loads
everything and reports what does not load, conflicts, or fits another version. `show` loads one component.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slime_core.errors import PluginError, PluginNotFoundError
from slime_core.plugins.kinds import HOOK_GROUP, KINDS, Kind, kind_of
from slime_core.plugins.registry import ComponentRef, Registry

_HEADER = ("KIND", "NAME", "FROM", "TARGET")


def add_parser(subparsers: Any) -> None:
    """Define `slime plugins` and its two sub-commands."""
    parser = subparsers.add_parser("plugins", help="list and inspect plugins")
    commands = parser.add_subparsers(dest="plugins_command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="every installed component; imports none of them")
    listing.add_argument("--kind", help=f"only this kind: {', '.join(KINDS)}")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.add_argument("--check", action="store_true", help="load everything; exit status 1 when something is wrong")
    showing = commands.add_parser("show", help="one component: signature, documentation, where it comes from")
    showing.add_argument("component", metavar="KIND/NAME", help="e.g. rewards/math, or KIND:SPEC: rewards:my_rm.py")
    for command in (listing, showing):
        command.add_argument("--plugin-dir", action="append", default=[], metavar="DIR", help="also look here")


def run(namespace: argparse.Namespace) -> int:
    """Run the sub-command; its exit status."""
    from slime_core.plugins.discovery import add_plugin_directories
    from slime_core.plugins.manager import current_registry

    add_plugin_directories(namespace.plugin_dir)
    registry = current_registry()
    if namespace.plugins_command == "show":
        return _show(namespace.component)
    return _list(registry, namespace.kind, as_json=namespace.json, check=namespace.check)


def _list(registry: Registry, kind: str | None, *, as_json: bool, check: bool) -> int:
    wanted = kind_of(kind).name if kind else None
    refs = [ref for ref in registry if wanted in (None, ref.kind)]
    wrong = _check(registry, refs) if check else []
    if as_json:
        print(json.dumps([_facts(ref) for ref in refs], indent=2))
    else:
        _print_table(_HEADER, [(_kind_word(ref), ref.name, _from(ref), ref.target) for ref in refs])
    for problem in registry.problems:
        print(f"not usable: {problem.where}: {problem.message}", file=sys.stderr)
    for message in wrong:
        print(f"not usable: {message}", file=sys.stderr)
    return int(check and bool(wrong or registry.problems))


def _check(registry: Registry, refs: Iterable[ComponentRef]) -> list[str]:
    """Everything that would stop a run which selects one of `refs`."""
    from slime_core.plugins.manager import build_manager
    from slime_core.plugins.resolve import resolve

    kinds = {ref.kind for ref in refs}
    wrong = [str(error) for error in registry.conflicts(sorted(kinds))]
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


def _from(ref: ComponentRef) -> str:
    if ref.folder is None:
        return ref.origin
    folder = ref.folder.relative_to(Path.cwd()) if ref.folder.is_relative_to(Path.cwd()) else ref.folder
    return f"{ref.origin} (dir {folder})"


def _kind_word(ref: ComponentRef) -> str:
    return "hooks" if ref.kind == HOOK_GROUP else ref.kind


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _show(component: str) -> int:
    from slime_core.plugins.resolve import resolve

    kind_word, separator, spec = _split(component)
    if not separator:
        raise PluginNotFoundError(f"slime plugins show {component!r}: write KIND/NAME or KIND:SPEC, e.g. rewards/math")
    kind = kind_of(kind_word)
    resolved = resolve(kind.name, spec, origin="slime plugins show")
    ref, obj = resolved.ref, resolved.obj
    line = _line_of(obj)
    rows = [
        ("kind", kind.name),
        ("name", ref.name),
        ("from", _from(ref)),
        ("target", ref.target),
        ("file", f"{ref.source_file}{f':{line}' if line else ''}"),
        ("requires", ", ".join(ref.requires) or "-"),
        ("selected by", ", ".join(kind.flags)),
        ("signature", _signature(obj)),
        ("called as", _calls(kind, obj)),
    ]
    for name, text in rows:
        print(f"{name + ':':<13}{text}")
    for name, text in _options(obj):
        print(f"option {name}: {text}")
    for documentation in dict.fromkeys((inspect.getdoc(obj), inspect.getdoc(inspect.getmodule(obj)))):
        if documentation:
            print(f"\n{documentation}")
    return 0


def _calls(kind: Kind, obj: Any) -> str:
    """How slime calls such an object."""
    methods = [f"{name}{call.shown}" for name, call in kind.methods.items() if callable(getattr(obj, name, None))]
    return "; ".join(methods or [call.shown for call in kind.calls]) or "-"


def _split(component: str) -> tuple[str, str, str]:
    """`rewards/math` and `rewards:./my_rm.py:reward` -> kind, separator, spec; the first separator counts."""
    position = next((i for i, character in enumerate(component) if character in "/:"), -1)
    if position < 0:
        return component, "", ""
    return component[:position], component[position], component[position + 1 :]


def _signature(obj: Any) -> str:
    name = getattr(obj, "__name__", type(obj).__name__)
    word = "async " if inspect.iscoroutinefunction(obj) else "class " if inspect.isclass(obj) else ""
    return f"{word}{name}{inspect.signature(obj)}"


def _line_of(obj: Any) -> int | None:
    try:
        return inspect.getsourcelines(obj)[1]
    except (OSError, TypeError):
        return None


def _options(obj: Any) -> list[tuple[str, str]]:
    """Fields of the component's `Options` model, when it has one."""
    fields = getattr(getattr(obj, "Options", None), "model_fields", {})
    return [
        (name, f"{field.annotation} = {field.default!r}. {field.description or ''}") for name, field in fields.items()
    ]
