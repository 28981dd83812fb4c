"""A trainer process as a Ray actor: the equivalent of an inline run's torchrun process, called by the driver's loop.

It has the same `Trainers`, `Learner` and, on rank 0, `WeightSync` as `launch/inline.py`; other ranks follow. The driver
calls all ranks at once, and they synchronize in the trainer's collectives as usual.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.sample import TrainBatch
from slime_launcher_ray.shell import Shell, travels
from slime_launcher_ray.wait import Member

if TYPE_CHECKING:
    from slime_core.launch.roles import Trainers


class TrainerActor(Shell):
    """The actor of one trainer rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._trainers: Trainers | None = None
        self._learner: Any = None
        self._weights: Any = None

    def set_place(self, variables: Mapping[str, str], num_ranks_here: int) -> None:
        """Set the variables that torchrun would set; by default the ranks of a node share its cores equally."""
        os.environ.update(variables)
        if num_ranks_here > 1 and "OMP_NUM_THREADS" not in os.environ and not self.order.settings.args.num_threads:
            threads = max(1, len(os.sched_getaffinity(0)) // num_ranks_here)
            os.environ["OMP_NUM_THREADS"] = str(threads)
            if "torch" in sys.modules:  # torch was preloaded and has already read the variable (`session._PRELOADED`)
                import torch

                torch.set_num_threads(threads)

    @travels
    def build(self, num_rollout: int, start_rollout_id: int, rollout: Member, again: bool = False) -> None:
        """Load the models and join the other ranks.

        Args:
            num_rollout: `--num-rollout`, or the number derived from the data.
            start_rollout_id: First rollout to do.
            rollout: The rollout actor, which receives the weights.
            again: True if the actor replaces a dead one; `load` then restores everything in the checkpoint.
        """
        from slime_core.launch.drive import build_learner, build_weights
        from slime_core.launch.ranks import is_leader
        from slime_core.weights.collective import FollowingWeights
        from slime_launcher_ray.receiver import RemoteReceiver

        run, args = self.prepared, self.prepared.args
        args.num_rollout, args.start_rollout_id = num_rollout, start_rollout_id
        if again:
            args.finetune, args.no_load_optim, args.no_load_rng = False, args.no_save_optim, args.no_save_rng
        self._trainers = run.parts.build_trainers(args)
        self._learner = build_learner(run, self._trainers)
        if is_leader():
            receiver = RemoteReceiver(rollout, args.update_weight_buffer_size)
            self._weights = build_weights(run, self._trainers, receiver, lambda version: None)
        else:
            self._weights = FollowingWeights(args, self._trainers.actor)

    @travels
    def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """Run all optimizer steps of a rollout."""
        metrics: dict[str, float] = self._learner.train(rollout_id, batch)
        return metrics

    @travels
    def push(self) -> tuple[dict[str, float], int]:
        """Send the weights to the engines; return metrics and the served version (0 from ranks other than 0)."""
        metrics: dict[str, float] = self._weights.push()
        return metrics, self.version()

    @travels
    def set_version(self, version: int) -> None:
        """Set the last version on resume."""
        self._weights.version = version

    def version(self) -> int:
        """Return the last served version, or the version to count from; 0 on ranks other than 0."""
        return int(getattr(self._weights, "version", 0))

    @travels
    def save(self, directory: Path) -> None:
        """Save this rank's part of a checkpoint."""
        assert self._trainers is not None
        self._trainers.save(directory)

    @travels
    def load(self, directory: Path) -> None:
        """Load this rank's part of a checkpoint."""
        assert self._trainers is not None
        self._trainers.load(directory)

    @travels
    def offload(self) -> None:
        """Free the memory that only training needs."""
        assert self._trainers is not None
        self._trainers.offload()

    @travels
    def onload(self) -> None:
        """Allocate the memory for training again."""
        assert self._trainers is not None
        self._trainers.onload()

    def close(self) -> None:
        """Leave process groups and free memory."""
        trainers, self._trainers = self._trainers, None
        if trainers is not None:
            trainers.close()
            self.prepared.hooks.slime_run_end(error=None)
