"""Stand-ins for the rollout stage when several trainer processes share one: rank 0 generates, the others receive.

All ranks run the same loop; the batch travels from rank 0 as JSON over the trainer's process group::

    rank 0   SendingRollout(RolloutStage)  --batch, metrics-->  ReceivingRollout   ranks 1..n-1
             Journal, save_together        --directory------->  FollowingJournal
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from slime_core.errors import RolloutError
from slime_core.launch.trainers import Trainers
from slime_core.protocols import Trainer
from slime_core.rollout.stage import RolloutResult, RolloutStage
from slime_core.routed_experts import json_default
from slime_core.types import TrainBatch

if TYPE_CHECKING:
    import torch


class SendingRollout:
    """Rank 0: the real stage, whose results also go to the other ranks."""

    def __init__(self, stage: RolloutStage, trainer: Trainer) -> None:
        self._stage = stage
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def generate(self, rollout_id: int) -> RolloutResult:
        """Generate and send; a failure is sent too, so that no rank waits for a batch that will not come."""
        try:
            result = self._stage.generate(rollout_id)
        except BaseException as error:
            self._trainer.broadcast(orjson.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        message = {"batch": asdict(result.batch), "metrics": result.metrics}
        self._trainer.broadcast(orjson.dumps(message, default=json_default))
        return result


class ReceivingRollout:
    """Ranks 1..n-1: receives what rank 0 generated."""

    weight_transports: tuple[str, ...] = ()

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def start(self) -> None:
        """Nothing to bring up."""

    def stop(self) -> None:
        """Nothing to free."""

    def generate(self, rollout_id: int) -> RolloutResult:
        """Wait for rank 0, at most as long as the process group's timeout. Raises RolloutError when rank 0 failed."""
        message = orjson.loads(self._trainer.broadcast(None))
        if "error" in message:
            raise RolloutError(f"rollout {rollout_id} failed on rank 0: {message['error']}")
        return RolloutResult(TrainBatch(**message["batch"]), message["metrics"])

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Rank 0 evaluates alone."""
        return {}

    def load(self, directory: Path, rollout_id: int) -> None:
        """The data cursor lives on rank 0."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """No engine here."""

    def update_weights_from_distributed(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """No engine here."""

    def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str] | None:
        """No engine here."""
        return []

    def update_weights_from_disk(self, path: Path, version: int) -> None:
        """No engine here."""

    def update_weights_from_delta(self, root: Path, version: int) -> None:
        """No engine here."""

    @property
    def engines(self) -> list[object]:
        """None here."""
        return []

    def weight_checksums(self) -> dict[str, str]:
        """No engine here."""
        return {}


def save_together(trainers: Trainers, directory: Path) -> None:
    """Rank 0: tell the others where the commit is being built, then save with them."""
    if trainers.world_size > 1:
        trainers.broadcast(str(directory).encode())
    trainers.save(directory)


class FollowingJournal:
    """Ranks 1..n-1: add this rank's part to rank 0's checkpoints and record nothing else."""

    def __init__(self, trainers: Trainers) -> None:
        self._trainers = trainers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 logs."""

    def step_end(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 tells the hooks."""

    def save(self, rollout_id: int) -> None:
        """Wait for rank 0's directory and save into it."""
        self._trainers.save(Path(self._trainers.broadcast(None).decode()))
