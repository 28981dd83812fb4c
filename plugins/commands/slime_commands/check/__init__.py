"""Find problems of a run before it starts: `slime check`, and the hook that every run calls first.

Every run loads this module, as all hook plugins; the hook imports its requirements when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core import hookimpl

if TYPE_CHECKING:
    from slime_core.launch.prepare import Prepared
    from slime_core.protocols.command import Finding


@hookimpl
def slime_preflight(run: Prepared) -> list[Finding]:
    """Check components, data, tokenizer, sizes, paths and disk space."""
    from slime_commands.check.preflight import preflight

    return preflight(run)
