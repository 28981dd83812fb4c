"""Job of a rank of `test_collective_weights.py`: push weights that a trainer has only together with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from slime_embedded.trainer.trainer import EmbeddedTrainer

from slime_core.config import Args
from slime_core.errors import WeightSyncError
from slime_core.models.hf_io import read_weights
from slime_core.protocols import TrainerTraits
from slime_core.weights.collective import FollowingWeights
from slime_core.weights.sync import WeightSync, tensor_checksum

Weights = Iterable[tuple[str, torch.Tensor]]


class Together(EmbeddedTrainer):
    """Every tensor takes a collective call, and only rank 0 gets it."""

    traits = TrainerTraits(collective_weights=True)
    passes = 0

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        for name, tensor in super().named_weights():
            mean = self.all_reduce(tensor) / self.world_size
            if self.rank == 0:
                yield name, mean


class Receiver:
    """Serves what it was given; `stops` says when it does not go on."""

    engines: ClassVar[list[object]] = []

    def __init__(self, *transports: str, stops: str = "") -> None:
        self.weight_transports = transports
        self.stops = stops
        self.served: dict[str, torch.Tensor] = {}

    def update_weights(self, transport: str, payload: Any, version: int) -> None:
        if transport == "disk":
            self.served = dict(read_weights(payload))
            return
        for name, tensor in payload:
            self.served[name] = tensor.clone()
            if self.stops == "update" and len(self.served) == 2:
                raise WeightSyncError("no more than two")

    def differing_weights(self, weights: Weights) -> list[str] | None:
        next(iter(weights))  # it begins, and finds that it cannot tell
        return None

    def weight_checksums(self) -> dict[str, str]:
        if self.stops == "check":
            raise WeightSyncError("cannot be asked")
        return {name: tensor_checksum(tensor) for name, tensor in self.served.items()}


def pushed(model: str, run_dir: str) -> dict[str, Any]:
    """Return what became of each case on this rank."""
    args = Args(
        hf_checkpoint=model, device="cpu", lr=0.0, distributed_timeout_minutes=1, run_dir=run_dir,
        check_weight_update_equal=True, keep_old_actor=True,
    )  # fmt: skip
    trainer = Together(args)
    receivers: dict[str, Callable[[], Receiver]] = {
        "tensor": lambda: Receiver("tensor"),
        "disk": lambda: Receiver("disk"),
        "no engine": Receiver,
        "stops in the update": lambda: Receiver("tensor", stops="update"),
        "stops in the check": lambda: Receiver("tensor", stops="check"),
        "again": lambda: Receiver("tensor"),
    }
    told: dict[str, Any] = {}
    for case, make in receivers.items():
        receiver, trainer.passes = make(), 0
        leads = trainer.rank == 0
        weights: Any = WeightSync(args, trainer, receiver) if leads else FollowingWeights(args, trainer)
        try:
            weights.push()
            outcome = "served"
        except WeightSyncError as error:
            outcome = str(error)
        own = {name: tensor.detach() for name, tensor in EmbeddedTrainer.named_weights(trainer)}
        equal = receiver.served.keys() == own.keys() and all(torch.equal(t, own[n]) for n, t in receiver.served.items())
        told[case] = [outcome, trainer.passes, equal]
    trainer.close()
    return told
