"""Note which hosts the processes of a rehearsal connect to, by an audit hook of Python in each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_FILE = "SLIME_SCRIPT_CONNECTIONS"
_HOOK = str(Path(__file__).with_name("watched"))


def environment(file: Path) -> dict[str, str]:
    """Return this process's environment for a rehearsal's processes, without settings that it gives.

    Args:
        file: File to which connections are noted.
    """
    from slime_core.config.spec import flag_specs

    kept = {name: value for name, value in os.environ.items() if not _is_setting(name, flag_specs())}
    path = os.pathsep.join([_HOOK, *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, _FILE: str(file)}


def _is_setting(variable: str, names: Mapping[str, object]) -> bool:
    return variable.startswith("SLIME_") and variable.removeprefix("SLIME_").lower() in names


@contextmanager
def noted(file: Path) -> Iterator[None]:
    """Note connections of processes that are started inside the block."""
    before = dict(os.environ)
    os.environ.update(environment(file))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def hosts(file: Path) -> list[tuple[str, str]]:
    """Return (host, first place in the code) of each host."""
    if not file.is_file():
        return []
    found: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        host, _, place = line.partition("\t")
        found.setdefault(host, place)
    return list(found.items())
