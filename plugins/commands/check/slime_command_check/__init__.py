"""What is wrong with a run before it starts: `slime check`, and the hook that every run asks first.

Loaded with every run, as all hook plugins are; it imports what it needs when it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core import hookimpl

if TYPE_CHECKING:
    from slime_core.launch.findings import Finding
    from slime_core.launch.prepare import Prepared


@hookimpl
def slime_preflight(run: Prepared) -> list[Finding]:
    """Components, data, tokenizer, sizes, paths and space."""
    from slime_command_check.preflight import preflight

    return preflight(run)
