"""Launchers: settings -> a finished run.

`run` picks the launcher (`launchers.py` says which); a launcher builds the stages and decides in which process each
one lives, and `slime_core.loop` runs the same loop over them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from slime_core.distributions import provided
from slime_core.protocols import Args, LauncherTraits
from slime_core.waits import waiting

if TYPE_CHECKING:
    from slime_core.config import Settings

# Before any module below loads torch: OpenMP threads that spin at barriers starve each other when trainer, engine and
# rewards share few cores. A policy set in the environment wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class InlineLauncher:
    """The stages live in this process, and in further trainer processes of this machine."""

    traits = LauncherTraits()

    def missing(self, args: Args) -> str:
        """Return an empty string: this launcher needs nothing else."""
        return ""

    def train(self, settings: Settings) -> dict[str, Any]:
        """Train in this process, or as a rank of a process group."""
        with waiting("loading code", deadline=None, then="as long as it takes"):
            from slime_core.launch import inline, ranks
        with ranks.as_rank():
            return inline.train(settings)


def run(settings: Settings) -> dict[str, Any]:
    """Train as `settings` say and return what `summary.json` holds."""
    from slime_core.launch import launchers, lock, ranks

    launcher = launchers.settle_launcher(settings)
    if ranks.is_leader():
        lock.finish_replacing(settings.args)
    if settings.args.debug_rollout_only:
        summary: dict[str, Any] = provided("slime.api", "train_without_training")(settings)
        return summary
    return launcher.train(settings)
