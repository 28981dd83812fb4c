"""Launchers: settings -> a finished run.

`run` picks the launcher (`launchers.py` says which); a launcher builds the stages and decides in which process each
one lives, and `slime_core.loop` runs the same loop over them.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.config import Settings

# Before any module below loads torch: OpenMP threads that spin at barriers starve each other when trainer, engine and
# rewards share few cores. A policy set in the environment wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run(settings: Settings) -> dict[str, Any]:
    """Train as `settings` say and return what `summary.json` holds."""
    from slime_core.launch import launchers
    from slime_core.waits import waiting

    launcher = launchers.settle_launcher(settings)
    if settings.args.debug_rollout_only:
        launchers.tell_inline_only(settings, settings.cite("debug_rollout_only"))
        from slime_core.launch import rollout_only

        return rollout_only.train_without_training(settings)
    # By name: the launchers beside the inline one are a layer above this one.
    with waiting("loading code", deadline=None, then="as long as it takes"):
        module = import_module(launchers.MODULES[launcher])
    if launcher == launchers.RAY:  # whose ranks are actors; it loads torch while its cluster starts
        found: dict[str, Any] = module.train(settings)
        return found
    from slime_core.launch import ranks

    with ranks.as_rank():
        summary: dict[str, Any] = module.train(settings)
    return summary
