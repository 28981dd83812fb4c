"""Which launcher a run gets: `--launcher`, or what the surroundings say; nothing is imported to find out.

    --launcher auto   ray      --ray-address is given, or RAY_ADDRESS is set, or a Ray job started this process
                      inline   otherwise, and in processes that torchrun started

`slime_core.launch.run` asks; `cluster/session.py` asks for the address.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

from slime_core.config import Settings
from slime_core.errors import ConfigError
from slime_core.protocols import Args

logger = logging.getLogger(__name__)

RAY, INLINE = "ray", "inline"
MODULES = {RAY: "slime_launcher_ray.launcher", INLINE: "slime_core.launch.inline"}
"""Where each has its `train(settings)`."""
_IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in the entry points of its jobs."""
_ADDRESS = "RAY_ADDRESS"


def settle_launcher(settings: Settings) -> str:
    """ "ray" or "inline", and `args.launcher` says so from now on.

    Raises:
        ConfigError: Ray is not installed, or the settings contradict each other.
    """
    args = settings.args
    by_torchrun = "WORLD_SIZE" in os.environ
    if args.launcher == "auto":
        chosen, why = _guess(args, by_torchrun)
        settings.derive("launcher", chosen, why)
    if args.launcher == RAY:
        if by_torchrun:
            raise ConfigError(
                f"{settings.cite('launcher')}: torchrun started this process (WORLD_SIZE is set), and Ray starts the"
                " trainer's processes itself; leave torchrun out, or type --launcher inline"
            )
        require_ray(settings.cite("launcher"))
    elif args.max_trainer_restarts:
        raise ConfigError(
            f"{settings.cite('max_trainer_restarts')}: only --launcher ray can restart the trainer. Inline, rank 0"
            " is the process that leads the run and has the engine, and the other ranks end with it; start the command"
            " again with --load, which goes on from the last commit"
        )
    elif args.ray_address:
        raise ConfigError(f"{settings.cite('ray_address')} contradicts {settings.cite('launcher')}; remove one")
    if args.max_trainer_restarts and not args.save_interval:
        raise ConfigError(
            f"{settings.cite('max_trainer_restarts')}: a restart begins at a commit, and before the end there is none"
            " without --save-interval; set it"
        )
    return str(args.launcher)


def tell_inline_only(settings: Settings, what: str) -> None:
    """Warn of settings of Ray that `what`, which does everything in this process, does not follow."""
    asked = [name for name in ("launcher", "ray_address") if settings.is_given(name) and settings.args.launcher == RAY]
    asked += ["ray_address"] if settings.args.ray_address and "ray_address" not in asked else []
    if asked:
        shown = ", ".join(settings.cite(name) for name in asked)
        logger.warning("%s: without effect with %s, which does everything in this process", shown, what)


def require_ray(why: str) -> None:
    """Raise ConfigError unless Ray is installed."""
    if find_spec("ray") is None:
        raise ConfigError(f'{why}: Ray is not installed; type pip install "slime-rl[ray]"')


def ray_address(args: Args) -> str | None:
    """The cluster to join: `--ray-address`, or that of the environment under `--launcher auto`; None: a local one."""
    return args.ray_address or os.environ.get(_ADDRESS) or ("auto" if _IN_A_JOB in os.environ else None)


def _guess(args: Args, by_torchrun: bool) -> tuple[str, str]:
    if args.ray_address:
        return RAY, "--ray-address"
    if by_torchrun:
        return INLINE, "started by torchrun"
    for name in (_ADDRESS, _IN_A_JOB):
        if name in os.environ:
            return RAY, f"environment variable {name}"
    return INLINE, "no Ray cluster is named"
