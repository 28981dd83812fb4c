"""A live display of a run in notebooks; outside of them the console's lines are the display."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from slime_core.errors import SlimeError
from slime_core.sample import Sample
from slime_python.html import sample_html
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
            self._handle = display(found, display_id=True)
        else:
            self._handle.update(found)


def notebook() -> Any:
    """Return IPython's shell in a notebook's kernel; None elsewhere. Samples are shown as tables from then on."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    shell.display_formatter.formatters["text/html"].for_type(Sample, sample_html)
    return shell
