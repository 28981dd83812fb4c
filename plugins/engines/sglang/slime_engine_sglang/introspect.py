"""Every flag of the installed SGLang server and router as JSON; run by the interpreter of SGLang's environment.

`python introspect.py [STUB_DIR/PACKAGE...]`, by `flag_list`. Stands alone: no slime in that environment. Importing
SGLang costs seconds and prints warnings, so the JSON is the last line of standard output. A package's stub is used only
without CUDA, and where the package itself is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from importlib import import_module
from typing import Any

SCHEMA = 1
"""Raised when the shape of the output changes, so that an older cache file is not read."""


def _plain(value: Any) -> Any:
    """The value when JSON can hold it, else None."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None


def _type_name(action: argparse.Action) -> str:
    """What converts a value: "switch" (no value), "toggle" (`--x`, `--no-x`), or the name of the type function."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "toggle"
    if action.nargs == 0:
        return "switch"
    return "str" if action.type is None else str(getattr(action.type, "__name__", type(action.type).__name__))


def _choices(choices: Any) -> list[Any]:
    """In the order given, or alphabetic for words, since some come from a hash table."""
    plain = [_plain(choice) for choice in choices]
    return sorted(plain) if all(isinstance(choice, str) for choice in plain) else plain


def describe(action: argparse.Action) -> dict[str, Any]:
    """One argparse action; what is empty is left out."""
    toggle = isinstance(action, argparse.BooleanOptionalAction)
    names = [name[2:] for name in action.option_strings if name.startswith("--")]
    found = {
        "names": [name for name in names if not (toggle and name.startswith("no-"))],
        "dest": action.dest,
        "type": _type_name(action),
        "nargs": action.nargs if action.nargs != 0 else None,
        "choices": None if action.choices is None else _choices(action.choices),
        "default": _plain(action.default),
        "const": _plain(action.const) if action.nargs == "?" else None,
        "help": None if action.help == argparse.SUPPRESS else action.help,
    }
    return {key: value for key, value in found.items() if value is not None}


def actions(add_cli_args: Any) -> list[dict[str, Any]]:
    """What a function adds to a parser, but for --help."""
    parser = argparse.ArgumentParser(add_help=False)
    add_cli_args(parser)
    return [describe(action) for action in parser._actions if action.option_strings]


def server_flags() -> list[dict[str, Any]]:
    """The flags of sglang.launch_server."""
    return actions(import_module("sglang.srt.server_args").ServerArgs.add_cli_args)


def router_flags() -> list[dict[str, Any]]:
    """The flags of sglang_router.launch_router; empty when no router is installed."""
    try:
        module = import_module("sglang_router.router_args")
    except ModuleNotFoundError:
        return []
    return actions(module.RouterArgs.add_cli_args)


def main(argv: list[str]) -> None:
    """Print the JSON."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        sys.path[:0] = [stub for stub in argv if importlib.util.find_spec(os.path.basename(stub)) is None]
    found = {"schema": SCHEMA, "server": server_flags(), "router": router_flags()}
    print("\n" + json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    # The script's own folder holds modules of slime whose names are no business of SGLang's.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    main(sys.argv[1:])
