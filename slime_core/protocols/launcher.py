"""The launcher protocol: a launcher builds the stages of a run and decides in which process each stage lives.

`gpu_layout` tells launchers and engines which GPUs (on CPU: places) training and inference take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.protocols.traits import LauncherTraits

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.protocols.functions import Args


class Launcher(Protocol):
    """A launcher, built without arguments. Its module imports nothing heavy, since `--launcher auto` loads them all."""

    traits: LauncherTraits

    def missing(self, args: Args) -> str:
        """Return the missing requirements with the command to install them; empty if nothing is missing."""

    def train(self, settings: Settings) -> dict[str, Any]:
        """Train with `settings` and return the contents of `summary.json`.

        Raises:
            ConfigError: A setting is wrong; nothing has been started.
            SlimeError: A stage raised it, in any process.
        """


@dataclass(frozen=True)
class GpuLayout:
    """GPUs of training and inference, numbered over the whole cluster, node after node."""

    total: int
    """GPUs of training and inference together."""
    trainer: int
    """GPUs of training, which come first."""
    first_engine: int
    """Number of inference's first GPU."""


def gpu_layout(args: Args, *, trainer: int, rollout: int) -> GpuLayout:
    """Return which GPUs training and inference take, as in THUDM/slime (placement_group.py).

    Training comes first and inference after it, or both begin at 0 (--colocate). With --debug-train-only, or with
    engines elsewhere, there is training only, and with --debug-rollout-only inference only.

    Args:
        args: The run's settings.
        trainer: GPUs that training would take.
        rollout: GPUs of the engines that this run starts; 0 if they are elsewhere.
    """
    if args.debug_rollout_only:
        trainer = 0
    if args.debug_train_only:
        rollout = 0
    first = 0 if args.colocate else trainer
    return GpuLayout(max(trainer, first + rollout), trainer, first)
