"""Ways to plant a bug into a run in this process: a function of the run is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


def wrapped(target: str, around: Callable[..., Any]) -> Plant:
    """`around(original, *args, **kwargs)` instead of the function at the dotted path."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = resolve_name(":".join(_split(target)))
        changed: Any = lambda *args, **kwargs: around(original, *args, **kwargs)  # noqa: E731
        owner = resolve_name(":".join(_split(target.rpartition(".")[0])))
        bound = isinstance(owner, type) and isinstance(vars(owner).get(target.rpartition(".")[2]), classmethod)
        patch.setattr(target, staticmethod(changed) if bound else changed)

    return plant


def _split(target: str) -> tuple[str, str]:
    """Module and attribute of a dotted path."""
    parts = target.split(".")
    for size in range(len(parts), 0, -1):
        try:
            import_module(".".join(parts[:size]))
        except ImportError:
            continue
        return ".".join(parts[:size]), ".".join(parts[size:])
    raise ValueError(target)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The settings, or a component that they name, are the bug."""
