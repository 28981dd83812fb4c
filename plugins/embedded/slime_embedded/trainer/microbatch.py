"""Pack samples of a `TrainBatch` into the tensors of a forward pass, with the experts to replay.

`sample_rows` checks the samples. A sample's last token is left out, because no token is predicted from it; it has no
row of `routed_experts` either. Samples with images keep it, because a model may have inputs for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from slime_core.errors import TrainError
from slime_core.models.config import ModelConfig
from slime_core.multimodal import TrainInputs
from slime_core.sample import TrainBatch
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.logprobs import SamplingMask
from slime_embedded.trainer.sample_rows import SampleRows, read_samples

if TYPE_CHECKING:
    from slime_embedded.models.routing import Routing

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """T tokens of n samples, without their last tokens unless these are needed, and R response tokens."""

    positions: list[int]
    """[n] positions of the samples in the batch."""
    token_ids: torch.Tensor
    """[T] int64."""
    lengths: list[int]
    """[n] number of the T tokens in each sample."""
    rows: np.ndarray
    """[R] indices of the T rows that predict a response token, sample by sample."""
    targets: torch.Tensor
    """[R] int64 response tokens."""
    response_lengths: list[int]
    """[n] response tokens of each sample; they sum to R."""
    same: np.ndarray
    """[T] marks of equal prompts, in the format of `Decoder.hidden`."""
    images: list[TrainInputs | None] | None = None
    """[n] image inputs of a vision-language model; None: there are no images."""
    mask: SamplingMask | None = None
    """Tokens that sampling could choose for each target; None: all tokens."""


def pack(
    batch: TrainBatch, positions: Sequence[int], vocab_size: int, device: torch.device, *, every_token: bool = False
) -> MicroBatch:
    """Lay the samples at `positions` end to end.

    Raises:
        TrainError: A sample has no prompt token, or a token id outside the vocabulary.
    """
    column = batch.multimodal_train_inputs
    rows = [None if column is None or column[i] is None else TrainInputs.of(column[i]) for i in positions]
    images = rows if any(row is not None for row in rows) else None
    samples = read_samples(batch, positions, vocab_size, every_token=every_token or images is not None)
    token_ids = torch.from_numpy(samples.token_ids).to(device)
    targets = torch.from_numpy(samples.targets).to(device)
    kept = samples.kept
    mask = None if kept is None else SamplingMask(torch.from_numpy(kept[0]).to(device), torch.from_numpy(kept[1]))
    columns = (samples.positions, token_ids, samples.lengths, samples.rows, targets, samples.response_lengths)
    return MicroBatch(*columns, _equal_prompts(batch, samples), images, mask)


def _equal_prompts(batch: TrainBatch, samples: SampleRows) -> np.ndarray:
    same, start, leaders = np.arange(len(samples.token_ids)), 0, dict[bytes, np.ndarray]()
    for position, length, response in zip(samples.positions, samples.lengths, samples.response_lengths, strict=True):
        prompt = slice(start, start + min(length, len(batch.tokens[position]) - response))
        same[prompt] = leaders.setdefault(samples.token_ids[prompt].tobytes(), same[prompt])
        start += length
    return same


def through(
    model: Decoder,
    micro: MicroBatch,
    head: Callable[[torch.Tensor], T],
    *,
    every_row: bool = False,
    routing: Routing | None = None,
) -> T:
    """Return `head` of the [R, hidden] states that predict the response tokens, or of the [T, hidden] of all.

    Raises:
        TrainError: The samples have images and the model takes none.
    """
    rows = None if every_row else micro.rows
    if model.config.images:
        return model.through(head, micro.token_ids, micro.lengths, rows=rows, images=micro.images)
    if micro.images is not None:
        raise TrainError(f"the samples have images, and a {model.config.model_type} model takes text only")
    # Copies of a prompt may be routed to different experts.
    same = None if every_row or model.config.moe is not None else micro.same
    return model.through(head, micro.token_ids, micro.lengths, rows=rows, same=same, routing=routing)


def routing_of(batch: TrainBatch, micro: MicroBatch, config: ModelConfig, device: torch.device) -> Routing | None:
    """Return the experts to replay, packed like the micro-batch; None if the batch has no such column."""
    if batch.routed_experts is None or config.moe is None:
        return None
    from slime_embedded.models.routing import FREE, Routing

    packed = np.full((sum(micro.lengths), config.num_layers, config.moe.experts_per_token), FREE, dtype=np.int64)
    start = 0
    for position, length in zip(micro.positions, micro.lengths, strict=True):
        known = batch.routed_experts[position]
        packed[start : start + len(known)] = known
        start += length
    return Routing(torch.from_numpy(packed).to(device))


def keep_routing(batch: TrainBatch, micro: MicroBatch, config: ModelConfig, routing: Routing) -> None:
    """Write the experts that the pass used where the batch has none, in place."""
    from slime_embedded.models.routing import FREE

    assert batch.routed_experts is not None
    assert config.moe is not None
    used = routing.used(sum(micro.lengths), config.num_layers, config.moe.experts_per_token).numpy()
    start = 0
    for position, length in zip(micro.positions, micro.lengths, strict=True):
        known = batch.routed_experts[position]
        np.copyto(known, used[start : start + len(known)], where=known == FREE, casting="same_kind")
        start += length
