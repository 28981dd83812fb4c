"""The names that a package offers and imports when they are asked for (PEP 562): those of its `if TYPE_CHECKING:`."""

from __future__ import annotations

import re


def exports(file: str) -> dict[str, str]:
    """Name -> the module that has it, of every line `from MODULE import NAME as NAME` in a package's `__init__.py`."""
    with open(file, encoding="utf-8") as source:
        found = re.findall(r"^    from (\S+) import (\w+) as \2$", source.read(), re.MULTILINE)
    return {name: module for module, name in found}
