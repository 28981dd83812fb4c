"""The trainer's forward pass under `--true-on-policy-mode`: the embedded engine's log-probs, bit for bit."""

from __future__ import annotations

import torch

from slime_core.models.batch_invariant import BatchInvariantForward, SequenceTiles
from slime_core.models.decoder import Decoder
from slime_core.models.routing import Routing
from slime_core.trainers.embedded.microbatch import MicroBatch


def invariant_log_probs(
    model: Decoder, micro: MicroBatch, temperature: float, *, with_entropy: bool, routing: Routing | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[R] log-probs of the response tokens of the temperature-scaled distribution, and their entropy if asked for."""
    forward = BatchInvariantForward(model)
    tiles = SequenceTiles.of(micro.lengths, micro.token_ids.device)
    hidden = forward.hidden(micro.token_ids, tiles.positions, tiles.attend(forward.scale), routing)
    rows = torch.from_numpy(micro.rows).to(hidden.device)
    return forward.token_log_probs(hidden[rows], micro.targets, temperature, with_entropy=with_entropy, mask=micro.mask)
