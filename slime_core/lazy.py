"""The names that a package offers and imports when they are used (PEP 562): those of its `if TYPE_CHECKING:`."""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib import import_module
from typing import Any


class Exports:
    """The names of a package, from every line `from MODULE import NAME as NAME` of its `__init__.py`."""

    def __init__(self, package: str, file: str, *, provided: Collection[str] = ()) -> None:
        """`provided`: names that an installed distribution has, by the entry-point group `slime.api`."""
        with open(file, encoding="utf-8") as source:
            found = re.findall(r"^    from (\S+) import (\w+) as \2$", source.read(), re.MULTILINE)
        self.places = {name: module for module, name in found}
        """Name -> the module that has it."""
        self.provided = provided
        self._package = package

    def load(self, name: str) -> Any:
        """Return the object of that name. Raises AttributeError, or ImportError if no distribution provides it."""
        if name in self.provided:
            return from_plugin(name)
        if name not in self.places:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}")
        return getattr(import_module(self.places[name]), name)


def from_plugin(name: str) -> Any:
    """Return what a distribution offers under that name. Raises ImportError if none does."""
    from slime_core.distributions import provided
    from slime_core.errors import PluginNotFoundError

    try:
        return provided("slime.api", name)
    except PluginNotFoundError as error:
        raise ImportError(str(error)) from None
