"""`slime plugins show`: everything about one component or hook plugin, loaded."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from slime_commands.plugins.naming import kind_word, origin, split
from slime_core.errors import name_of
from slime_core.plugins.kind import Kind
from slime_core.plugins.kinds import HOOK_GROUP, KINDS, kind_of
from slime_core.plugins.registry import ComponentRef
from slime_core.text import json_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("component", metavar="KIND/NAME", help="e.g. rewards/math, or KIND:SPEC: rewards:my_rm.py")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(namespace: argparse.Namespace) -> int:
    """Print the facts, options and documentation of a component."""
    from slime_core.text import table

    kind, spec = split(namespace.component, "slime plugins show")
    ref, obj = _load(kind, spec)
    if namespace.json:
        options = [dict(zip(("set", "type", "default", "help"), row)) for row in _options(ref, obj)[1:]]
        print(json_text({**dict(_facts(kind, ref, obj)), "options": options, "doc": inspect.getdoc(obj)}, indent=2))
        return 0
    for name, text in _facts(kind, ref, obj):
        print(f"{name + ':':<13}{text}")
    rows = _options(ref, obj)
    if rows:
        print("\noptions\n" + "\n".join(f"  {line}" for line in table(rows)))
    for documentation in dict.fromkeys((inspect.getdoc(obj), inspect.getdoc(inspect.getmodule(obj)))):
        if documentation:
            print(f"\n{documentation}")
    return 0


def _load(kind: str, spec: str) -> tuple[ComponentRef, Any]:
    from slime_core.plugins.manager import current_registry, load_hook_module
    from slime_core.plugins.resolve import resolve

    if kind == HOOK_GROUP:
        found = load_hook_module(current_registry().get(HOOK_GROUP, spec))
        return found.ref, found.obj
    resolved = resolve(kind, spec, origin="slime plugins show")
    row = KINDS.get(resolved.ref.kind)  # none for the function of a hook's flag
    return resolved.ref, resolved.obj.run if row is not None and row.instance else resolved.obj


def _facts(key: str, ref: ComponentRef, obj: Any) -> list[tuple[str, str]]:
    from slime_commands.plugins.tracing import place_of

    facts = ref.provenance()
    rows = [("kind", kind_word(ref)), ("name", ref.name), ("from", origin(ref)), ("target", ref.target)]
    rows += [("file", place_of(obj, ref)), ("source hash", f"sha256 {facts['sha256']}" if facts["sha256"] else "-")]
    rows.append(("requires", ", ".join(ref.requires) or "-"))
    if ref.kind == HOOK_GROUP:
        rows += [("selected by", "nothing: every installed one is listed; SLIME_PLUGINS=... allows some")]
        return [*rows, ("hooks", ", ".join(hooks_of(obj)) or "-")]
    kind = kind_of(key)
    rows += [("selected by", ", ".join(kind.flags)), ("type", _selection(kind, ref))]
    return [*rows, ("signature", _signature(obj)), ("called as", _calls(kind, obj))]


def _selection(kind: Kind, ref: ComponentRef) -> str:
    """Return a flag with its value, as typed on the command line."""
    flags = [flag for flag in kind.flags if flag.startswith("--")]
    if not flags:
        return "-"
    is_path = not ref.distribution and ref.registered is None
    paths = [flag for flag in flags if flag.endswith("-path")]
    return f"{(paths if is_path and paths else flags)[0]} {ref.prefix}{ref.name}"


def hooks_of(plugin: Any) -> list[str]:
    """Return the names of the hooks that a hook plugin implements."""
    return [name for name, member in inspect.getmembers(plugin) if getattr(member, "slime_impl", None)]


def _calls(kind: Kind, obj: Any) -> str:
    """Return the calls that slime makes to such an object."""
    methods = [call.of_method(name) for name, call in kind.methods.items() if callable(getattr(obj, name, None))]
    return "; ".join(methods or [call.shown for call in kind.calls]) or "-"


def _signature(obj: Any) -> str:
    name = name_of(obj)
    word = "async " if inspect.iscoroutinefunction(obj) else "class " if inspect.isclass(obj) else ""
    return f"{word}{name}{inspect.signature(obj)}"


def _options(ref: ComponentRef, obj: Any) -> list[tuple[str, ...]]:
    """Return a header and the options in the form of `--set`; empty without options."""
    from slime_commands.plugins.option_rows import option_rows
    from slime_core.plugins.options import option_name, options_model

    model = options_model(obj)
    rows = option_rows(model) if model else []
    if not rows:
        return []
    key = option_name(ref)
    cells = [(f"plugins.{key}.{row.name}", row.type, row.default or "must be given", row.help) for row in rows]
    return [("--set", "TYPE", "DEFAULT", ""), *cells]
