"""The process that runs the tests: it never runs code of the program, and calls it over `remote.Peer`.

`harness.py` calls `run_tests` with a channel to the program's process. A test passes if its text runs to the end in
this process.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from slime_rewards.code.remote import Exchange, Peer

_FILE, _MODULE = "<tests>", "__main__"


def run_tests(statements: list[str], exchange: Exchange, passed: Callable[[int], None]) -> None:
    """Run each text in a scope of its own; `passed` hears the index of each that ran to its end."""
    peer = Peer(exchange, _permits)
    for index, text in enumerate(statements):
        try:
            tree = ast.parse(text)
            module = sys.modules[_MODULE] = types.ModuleType(_MODULE)
            vars(module).update(_names(tree, peer))
            exec(compile(tree, _FILE, "exec"), vars(module))
        except BaseException:
            continue
        passed(index)


def _names(tree: ast.AST, peer: Peer) -> dict[str, Any]:
    """Return the names that the text takes from the program.

    Modules are imported in this process. The name of a built-in means the built-in, with one exception: the text uses a
    single built-in's name that the program defines, and no other name of the program (`assert sum(10, 15) == 6`).
    """
    used: set[str] = set()
    bound: set[str] = set()
    bases: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            bases.add(node.value.id)
    standard = vars(builtins).keys()
    found = peer.ask("names", sorted(used)) if used else {}
    found = {name: found[name] for name in used & found.keys() if not name.startswith("__")}  # only the requested names
    own = {name: found[name] for name in found.keys() - standard}
    for name in own.keys() & bases & sys.stdlib_module_names:
        own[name] = importlib.import_module(name)
    shadowing = found.keys() & standard
    if len(shadowing) == 1 and not (used - bound - standard):
        own.update({name: found[name] for name in shadowing})
    return own


def _permits(operation: str, operands: list[Any]) -> bool:
    """Return whether the program may do this to a test's object: call functions, use public attributes of objects."""
    held = operands[0] if operands else None
    if operation == "call":
        function = held.__func__ if isinstance(held, types.MethodType) else held
        return isinstance(function, types.FunctionType) and function.__code__.co_filename == _FILE
    if type(held).__module__ != _MODULE:
        return operation in ("iter", "next") and isinstance(held, Iterator)
    if operation in ("get", "set"):
        public = isinstance(operands[1], str) and not operands[1].startswith("_")
        return public and (operation == "get" or operands[1] in vars(held))
    return operation in ("eq", "bool", "hash", "str", "repr", "base", "len", "iter", "next", "getitem", "contains")
