"""Distributions that are not slime's, as pip would have left them on `sys.path`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slime_core.plugins.manager import forget_registry

THEIRS = ("acme_", "cliplug_", "plug_", "slime_file_", "thing_")


def install(folder: Path, distribution: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str) -> None:
    """Modules and metadata of a distribution, version 1.0, in a folder that is on `sys.path` from now on."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    tables = [[f"[{group}]", *(f"{k} = {v}" for k, v in table.items())] for group, table in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(line for table in tables for line in table) + "\n")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    forget_registry()


@contextmanager
def forgotten() -> Iterator[None]:
    """Afterwards there are none: their modules begin with one of `THEIRS`."""
    path, modules = list(sys.path), set(sys.modules)
    forget_registry()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.startswith(THEIRS):
                del sys.modules[name]
        forget_registry()
