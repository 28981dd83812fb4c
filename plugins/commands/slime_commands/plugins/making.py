"""`slime plugins new`: write a distribution to start from."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Kind, name and place."""
    parser.add_argument("kind", help="rewards, generators, filters, ... (`slime plugins list` shows kinds), or hooks")
    parser.add_argument("name", help="the name users select it by: lower case, digits, '_'")
    parser.add_argument("--dir", default=".", help="where its folder goes (default: here)")


def run(namespace: argparse.Namespace) -> int:
    """Write the files and say what to type next."""
    from slime_commands.plugins.scaffold import plan, write
    from slime_core.plugins.manager import current_registry

    made = plan(namespace.kind, namespace.name, Path(namespace.dir), current_registry())
    write(made)
    print(f"wrote {made.folder}:")
    for path in made.files:
        print(f"  {path}")
    print("next:")
    print(f"  edit {made.folder / made.package / '__init__.py'}")
    print(f"  slime plugins check {made.folder}")
    # Without the dots pip would look for that name on the package index.
    folder = made.folder if made.folder.is_absolute() else f"./{made.folder}"
    print(f"  slime plugins install {shlex.quote(str(folder))}")
    return 0
