"""`slime init` (train): write a run file to begin with; without arguments, list the templates.

A run file is commented and trains as it is. Templates are the files of `templates/`: what a template's line of the list
says is its first line, and the command it is for is in its second, under the name `run.yaml`. Loads nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_core.files import replace_file
from slime_core.protocols import Command

_NAME = "run.yaml"
"""File name of the run file in the templates, and the default of FILE."""
_BESIDE: Mapping[str, tuple[str, ...]] = {"agent": ("agent.py",), "smollm2": ("smollm2_reward.py",)}
"""Template -> further files, to which the run file refers in its own directory."""
TEMPLATES = ("demo", "grpo", "smollm2", "tools", "agent", "sft")
"""Templates, in the order of the list."""


def add_parser(subparsers: Any) -> None:
    """Define `slime init`."""
    parser = subparsers.add_parser(
        "init",
        help="write a run file to begin with",
        description="Write a commented run file that trains as it is; without arguments, list what there is.",
        epilog=_listed(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("template", nargs="?", choices=TEMPLATES, metavar="TEMPLATE", help=", ".join(TEMPLATES))
    parser.add_argument("file", nargs="?", type=Path, default=Path(_NAME), metavar="FILE", help=f"default: {_NAME}")
    parser.add_argument("--force", action="store_true", help="write over what is there")


def run(namespace: argparse.Namespace) -> int:
    """Write the files, and say what to type next. Raises ConfigError for files that are there."""
    if namespace.template is None:
        print(f"usage: slime init TEMPLATE [FILE] [--force]\n\n{_listed()}")
        return 0
    target: Path = namespace.file
    if target.name in _beside(namespace):
        raise ConfigError(f"slime init: {target} is a file of the template beside the run file; type another FILE")
    texts = {target: _text(namespace.template).replace(_NAME, target.name)}
    texts |= {target.with_name(name): _folder().joinpath(name).read_text("utf-8") for name in _beside(namespace)}
    for path in texts:
        if path.exists() and not namespace.force:
            raise ConfigError(f"slime init: {path} is there; --force writes over it, another FILE leaves it alone")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path.resolve(), text.encode())
    except OSError as error:
        raise ConfigError(f"slime init: cannot write {path}: {error.strerror}") from error
    print(f"wrote {', '.join(map(str, texts))}; next: {_command(namespace.template)} --config {target}")
    return 0


def _beside(namespace: argparse.Namespace) -> tuple[str, ...]:
    return _BESIDE.get(namespace.template, ())


def _folder() -> Traversable:
    return resources.files("slime_commands.init").joinpath("templates")


def _text(template: str) -> str:
    return _folder().joinpath(f"{template}.yaml").read_text("utf-8")


def _command(template: str) -> str:
    """Return `slime train` or `slime sft`, from the template's second line."""
    return _text(template).splitlines()[1].removeprefix("# Run: ").partition(" --config")[0]


def _listed() -> str:
    width = max(map(len, TEMPLATES))
    return "\n".join(f"  {name:<{width}}  {_text(name).splitlines()[0].removeprefix('# ')}" for name in TEMPLATES)


command = Command(run, add_parser)
