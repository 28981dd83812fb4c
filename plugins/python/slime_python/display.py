"""A live display of a run in notebooks; outside of them the console's lines are the display."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from slime_core.errors import SlimeError
from slime_python.html import notebook
from slime_python.records import Run

_PERIOD_S = 2.0


class Display:
    """Curves and newest samples of a run below the cell that trains, replaced every few seconds.

    Args:
        run: Returns the records; raises SlimeError before the run has begun.
    """

    def __init__(self, run: Callable[[], Run]) -> None:
        self._run = run
        self._shell = notebook()
        self._handle: Any = None
        self._shown = 0.0

    def __call__(self) -> None:
        """Show the newest state, if the last one is some seconds old."""
        if self._shell is not None and time.monotonic() - self._shown > _PERIOD_S:
            self.last()

    def last(self) -> None:
        """Show the newest state; do nothing outside of notebooks, and before the run has records."""
        if self._shell is None:
            return
        self._shown = time.monotonic()
        try:
            found = self._run()
        except SlimeError:
            return
        from IPython.display import display

        if self._handle is None:
            self._handle = display(found, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(found)
