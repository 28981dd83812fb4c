"""A micro-batch's share of `TrainBatch.routed_experts`: into the forward pass, and what it used back into the batch.

Called by the trainer around the actor's passes. What a reader would get wrong: a sample's last token has no row, as
nothing is predicted from it; it routes freely and nobody sees the result.
"""

from __future__ import annotations

import numpy as np
import torch

from slime_core.models.config import ModelConfig
from slime_core.models.routing import FREE, Routing
from slime_core.trainers.embedded.microbatch import MicroBatch
from slime_core.types import TrainBatch


def routing_of(batch: TrainBatch, micro: MicroBatch, config: ModelConfig, device: torch.device) -> Routing | None:
    """The experts to replay, packed as the micro-batch is; None when the batch has no such column."""
    if batch.routed_experts is None or config.moe is None:
        return None
    packed = np.full((sum(micro.lengths), config.num_layers, config.moe.experts_per_token), FREE, dtype=np.int64)
    start = 0
    for position, length in zip(micro.positions, micro.lengths, strict=True):
        packed[start : start + length - 1] = batch.routed_experts[position]
        start += length
    return Routing(torch.from_numpy(packed).to(device))


def keep_routing(batch: TrainBatch, micro: MicroBatch, config: ModelConfig, routing: Routing) -> None:
    """Write the experts that the pass used where the batch has none, in place."""
    assert batch.routed_experts is not None
    assert config.moe is not None
    used = routing.used(sum(micro.lengths), config.num_layers, config.moe.experts_per_token).numpy()
    start = 0
    for position, length in zip(micro.positions, micro.lengths, strict=True):
        known = batch.routed_experts[position]
        np.copyto(known, used[start : start + length - 1], where=known == FREE, casting="same_kind")
        start += length
