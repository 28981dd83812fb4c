"""The table of layouts: how many GPUs (on CPU: places) a run takes together, and which is the first of inference.

    disaggregated        training first, inference after it
    --colocate           both from 0
    --debug-train-only   training only
    --debug-rollout-only inference only
    engines elsewhere    training only

The one statement of it, as in THUDM/slime (placement_group.py): the launchers' placement and the plan of SGLang's
servers both ask here. Of the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.protocols import Args


@dataclass(frozen=True)
class GpuLayout:
    """Numbers are counted over the whole cluster, node after node."""

    total: int
    """GPUs of training and inference together."""
    trainer: int
    """Training has those before this number."""
    first_engine: int
    """Number of inference's first GPU."""


def gpu_layout(args: Args, *, trainer: int, rollout: int) -> GpuLayout:
    """The row of the table that the settings are in.

    Args:
        args: The run's settings.
        trainer: GPUs that training would take.
        rollout: GPUs of the engines that this run starts; 0 where they are elsewhere.
    """
    if args.debug_rollout_only:
        trainer = 0
    if args.debug_train_only:
        rollout = 0
    first = 0 if args.colocate else trainer
    return GpuLayout(max(trainer, first + rollout), trainer, first)
