"""What becomes of something written for THUDM/slime; the tables beside are made of it, and so are those of
docs/migrating-from-slime.md."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """One line of a table."""

    kind: str
    """"works", "differs" (it runs, and something is otherwise), or "refused" (an error before anything starts)."""
    why: str = ""
    """In the words of the documentation; empty where it simply works."""
