"""Print every flag of the installed SGLang server and router as JSON; runs in the interpreter of SGLang's environment.

`flag_list` runs `python introspect.py [STUB_DIR/PACKAGE...]`. The script imports no slime, which that environment does
not have. Importing SGLang takes seconds and prints warnings, so the JSON is the last line of standard output. A
package's stub is used only without CUDA and only if the package itself is not installed.
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
"""Version of the output format, incremented by a change, so that an older cache file is not read."""


def _plain(value: Any) -> Any:
    """Return the value if JSON can represent it, else None."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None


def _type_name(action: argparse.Action) -> str:
    """Return "switch" (no value), "toggle" (`--x`, `--no-x`), or the name of the function that converts the value."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "toggle"
    if action.nargs == 0:
        return "switch"
    return "str" if action.type is None else str(getattr(action.type, "__name__", type(action.type).__name__))


def _choices(choices: Any) -> list[Any]:
    """Return the choices in their order, but words alphabetically, since some come from a hash table."""
    plain = [_plain(choice) for choice in choices]
    return sorted(plain) if all(isinstance(choice, str) for choice in plain) else plain


def describe(action: argparse.Action) -> dict[str, Any]:
    """Describe an argparse action; empty entries are omitted."""
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
    """Describe the actions that a function adds to a parser."""
    parser = argparse.ArgumentParser(add_help=False)
    add_cli_args(parser)
    return [describe(action) for action in parser._actions if action.option_strings]


def server_flags() -> list[dict[str, Any]]:
    """Return the flags of sglang.launch_server."""
    return actions(import_module("sglang.srt.server_args").ServerArgs.add_cli_args)


def router_flags() -> list[dict[str, Any]]:
    """Return the flags of sglang_router.launch_router; empty if no router is installed."""
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
    # Remove the script's own folder: SGLang must not import slime's modules from it.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    main(sys.argv[1:])
