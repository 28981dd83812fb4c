"""Whether a script, flag or name of THUDM/slime works here; `make docs` builds `migrating.md` of the tables."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """One line of a table."""

    kind: str
    """"works", "differs" (it runs, and something is otherwise), or "refused" (an error before anything starts)."""
    why: str = ""
    """In the words of the documentation; empty where it simply works."""
