"""One process of the trainer: what torchrun's processes are inline, told what to do by the driver's loop.

The same `Trainers`, `Learner` and, on rank 0, `WeightSync` as `launch/inline.py` has; other ranks follow. The driver
calls all ranks at once, and they meet in the trainer's collectives, as ever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.types import TrainBatch
from slime_launcher_ray.shell import Shell, travels
from slime_launcher_ray.wait import Member

if TYPE_CHECKING:
    from slime_core.launch.trainers import Trainers


class TrainerActor(Shell):
    """One rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._trainers: Trainers | None = None
        self._learner: Any = None
        self._weights: Any = None

    def set_place(self, variables: Mapping[str, str], num_ranks_here: int) -> None:
        """What torchrun would set; without another word this node's cores are shared."""
        os.environ.update(variables)
        if num_ranks_here > 1 and "OMP_NUM_THREADS" not in os.environ and not self.order.settings.args.num_threads:
            threads = max(1, len(os.sched_getaffinity(0)) // num_ranks_here)
            os.environ["OMP_NUM_THREADS"] = str(threads)
            if "torch" in sys.modules:  # loaded before, so it has read the variable (`session._PRELOADED`)
                import torch

                torch.set_num_threads(threads)

    @travels
    def build(self, num_rollout: int, start_rollout_id: int, rollout: Member, again: bool = False) -> None:
        """Load the models and join the other ranks.

        Args:
            num_rollout: `--num-rollout`, also where the data decided it.
            start_rollout_id: First rollout to do.
            rollout: The rollout actor, which takes the weights.
            again: This one is in the place of one that died, so it takes all of the commit that it will `load`.
        """
        from slime_core.launch.drive import build_learner, build_weights
        from slime_core.launch.process import is_leader
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
        """All optimizer steps of one rollout."""
        metrics: dict[str, float] = self._learner.train(rollout_id, batch)
        return metrics

    @travels
    def push(self) -> tuple[dict[str, float], int]:
        """Weights to the engines; metrics, and the version served (0 from ranks other than 0)."""
        metrics: dict[str, float] = self._weights.push()
        return metrics, int(getattr(self._weights, "version", 0))

    @travels
    def set_version(self, version: int) -> None:
        """On resume: the version before the next one."""
        self._weights.version = version

    def version(self) -> int:
        """Served last, or to be counted from; 0 on ranks other than 0."""
        return int(getattr(self._weights, "version", 0))

    @travels
    def save(self, directory: Path) -> None:
        """This rank's part of a checkpoint."""
        assert self._trainers is not None
        self._trainers.save(directory)

    @travels
    def load(self, directory: Path) -> None:
        """Inverse of `save`."""
        assert self._trainers is not None
        self._trainers.load(directory)

    @travels
    def offload(self) -> None:
        """Give up what only training needs."""
        assert self._trainers is not None
        self._trainers.offload()

    @travels
    def onload(self) -> None:
        """Take it again."""
        assert self._trainers is not None
        self._trainers.onload()

    def close(self) -> None:
        """Leave process groups and free memory."""
        trainers, self._trainers = self._trainers, None
        if trainers is not None:
            trainers.close()
            self.prepared.hooks.slime_run_end(error=None)
