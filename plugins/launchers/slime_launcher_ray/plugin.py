"""The part of the plugin that does not import Ray: the launcher, its traits, and the address of the cluster."""

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
"""Environment variable that Ray sets in the entry points of its jobs."""


class RayLauncher:
    """A launcher that runs the stages in actors of a Ray cluster."""

    traits = LauncherTraits(
        settings=("ray_address",),
        variables=(ADDRESS, IN_A_JOB),
        spans_nodes=True,
        restarts_trainer=True,
        restarts_engines=True,
    )

    def missing(self, args: Args | None = None) -> str:
        """Return a message if Ray is not installed, otherwise an empty string."""
        return "" if find_spec("ray") else 'Ray is not installed; type pip install "slime-rl[ray]"'

    def train(self, settings: Settings) -> dict[str, Any]:
        """Run `slime train` or `slime sft` on the cluster; torch is loaded while a local cluster starts."""
        with waiting("loading code", deadline=None, then="as long as it takes"):
            from slime_launcher_ray.launcher import train
        return train(settings)


def ray_address(args: Args) -> str | None:
    """Return the cluster to join: `--ray-address`, or the environment's address; None starts a local cluster."""
    return args.ray_address or os.environ.get(ADDRESS) or ("auto" if IN_A_JOB in os.environ else None)
