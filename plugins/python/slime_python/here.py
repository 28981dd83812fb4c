"""Objects of this process that specs name as `slime_python.here:NAME`; other processes have none of them."""

from __future__ import annotations

import itertools
import re
from typing import Any

_numbers = itertools.count(1)
_names: dict[str, str] = {}
"""Attribute of this module -> argument and name of the object."""


def keep(kind: str, given: Any, name: str) -> str:
    """Make the object an attribute of this module and return its spec; `name` is for messages."""
    attribute = f"{kind}_{next(_numbers)}"
    globals()[attribute] = given
    _names[attribute] = f"{kind} {name}"
    return f"{__name__}:{attribute}"


def told(text: str) -> str:
    """Return argument and name of the objects that a setting's value names, as text; empty if there are none."""
    return ", ".join(_names[found] for found in re.findall(rf"{re.escape(__name__)}:(\w+)", text) if found in _names)
