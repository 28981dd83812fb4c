"""What slime finds without importing Ray: the launcher, what chooses it, and the address of the cluster."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slime_core.protocols import Args, LauncherTraits
from slime_core.waits import waiting

if TYPE_CHECKING:
    from slime_core.config import Settings

ADDRESS = "RAY_ADDRESS"
IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in the entry points of its jobs."""


class RayLauncher:
    """The stages live in actors of a Ray cluster."""

    traits = LauncherTraits(
        settings=("ray_address",),
        variables=(ADDRESS, IN_A_JOB),
        spans_nodes=True,
        restarts_trainer=True,
        restarts_engines=True,
    )

    def missing(self, args: Args | None = None) -> str:
        """Ray, where it is not installed."""
        return "" if find_spec("ray") else 'Ray is not installed; type pip install "slime-rl[ray]"'

    def train(self, settings: Settings) -> dict[str, Any]:
        """`slime train` and `slime sft` on the cluster; it loads torch while a cluster of its own starts."""
        with waiting("loading code", deadline=None, then="as long as it takes"):
            from slime_launcher_ray.launcher import train
        return train(settings)


def ray_address(args: Args) -> str | None:
    """The cluster to join: `--ray-address`, or that of the environment under `--launcher auto`; None: a local one."""
    return args.ray_address or os.environ.get(ADDRESS) or ("auto" if IN_A_JOB in os.environ else None)
