"""Objects of this process that specs name as `slime_python.here:NAME`; other processes have none of them."""

from __future__ import annotations

import itertools
from typing import Any

_numbers = itertools.count(1)


def keep(kind: str, given: Any) -> str:
    """Make the object an attribute of this module and return its spec."""
    name = f"{kind}_{next(_numbers)}"
    globals()[name] = given
    return f"{__name__}:{name}"
