"""Each component of a run, called once before it starts: `probes.py` in a fresh interpreter, `fresh_process.py` here.

Loaded with every run, as all hook plugins are; it imports what it needs when it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core import hookimpl

if TYPE_CHECKING:
    from slime_core.launch.prepare import Prepared
    from slime_testing_probes.fresh_process import FreshProcess


@hookimpl
def slime_preflight(run: Prepared) -> FreshProcess:
    """A process that loads what the run's settings name."""
    from slime_testing_probes.fresh_process import FreshProcess

    return FreshProcess(run)
