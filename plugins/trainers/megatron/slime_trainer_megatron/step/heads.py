"""Convert hidden states of the last layer to a loss's inputs: log-probs, entropy, logits or values of responses.

Called by `forward.py`; the only place that looks inside a `GPTModel`. Only the rows that predict a response token go
through the output layer: under sequence parallelism hidden states are gathered first, then rows are taken.
`hidden_states` calls the innermost model. The wrapper for 16-bit weights would make the last stage's whole logits
float32, and the model itself would send every row through the output layer.

Per-token results of the context-parallel ranks -> whole responses, in order, on each of them; differentiable.

Called by `forward.py` on the last pipeline stage, so that a loss always sees whole responses (ratios of a sequence,
means over samples) and is the same number on every context-parallel rank. Backward does not sum over ranks. Every rank
differentiates the same loss with respect to its own tokens; the data- and context-parallel sum of parameter gradients
adds these parts up, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from slime_core.protocols import MicroBatchOutput
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.step.packed import PackedBatch
from slime_trainer_megatron.step.vocab_parallel import VocabularyPart, default_rows, vocab_parallel_log_probs
from slime_trainer_megatron.weights.parameters import unwrapped

ReadLogits = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""Function of logits [rows, vocabulary], divided by the temperature, and the rows' tokens; see `protocols.Trainer`."""


def hidden_states(chunk: Any, micro: PackedBatch) -> torch.Tensor:
    """Return the [T, 1, hidden] states of the chunk's last layer ([T / tp, 1, hidden] under sequence parallelism)."""
    model = unwrapped(chunk)
    with _without_output_layer(model):
        hidden: torch.Tensor = model(
            input_ids=micro.token_ids,
            position_ids=micro.position_ids,
            attention_mask=None,
            packed_seq_params=micro.sequence_params(),
            **_router_padding(model, micro),
        )
    return hidden


@contextmanager
def _without_output_layer(model: Any) -> Iterator[None]:
    """Make `GPTModel.forward` return the hidden states, by making it assume that another stage follows."""
    before = model.post_process
    model.post_process = False
    try:
        yield
    finally:
        model.post_process = before


def has_router_losses(config: Any) -> bool:
    """Return whether an auxiliary loss of the routers has a coefficient."""
    coefficients = [config.moe_z_loss_coeff, config.moe_aux_loss_coeff]
    return bool(config.num_moe_experts) and any(any(c) if isinstance(c, list | tuple) else c for c in coefficients)


def _router_padding(model: Any, micro: PackedBatch) -> dict[str, torch.Tensor]:
    """Exclude padding from the routers' auxiliary losses and from the counts that move their biases.

    Only the first stage splits the mask over sequence-parallel ranks (models/gpt/gpt_model.py `_preprocess`).
    """
    config = model.config
    if not has_router_losses(config) and not config.moe_router_bias_update_rate:
        return {}
    padding = micro.padding
    if config.sequence_parallel and not model.pre_process:
        rank, size = model.pg_collection.tp.rank(), model.pg_collection.tp.size()
        padding = padding.chunk(size, dim=1)[rank]
    return {"padding_mask": padding}


@dataclass(frozen=True)
class Head:
    """The computation after the last layer, on the last stage's last chunk."""

    chunk: Any
    """The chunk that holds the output layer; any chunk on other stages."""
    groups: ProcessGroups
    vocab_size: int
    """Number of tokens, without padding of the vocabulary."""
    temperature: float
    chunk_size: int
    """Value of `--log-probs-chunk-size`."""

    def log_probs(
        self, hidden: torch.Tensor, micro: PackedBatch, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [R] float32 log-probs of response tokens under the temperature-scaled distribution, and entropies."""
        logits = self._output_layer(self._whole(hidden).index_select(0, micro.rows))
        return self._from_logits(logits, micro, with_entropy, overwrite=True)

    def over_logits(self, hidden: torch.Tensor, micro: PackedBatch, read: ReadLogits) -> tuple[torch.Tensor, ...]:
        """Return the tensors [R, ...] of `read`, which sees the logits of a few rows at a time, gathered whole."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        logits = self._output_layer(self._whole(hidden).index_select(0, micro.rows))
        rows = self.chunk_size if self.chunk_size > 0 else default_rows(logits)
        found = []
        for part, targets in zip(torch.split(logits, rows), torch.split(micro.targets, rows)):
            whole: torch.Tensor = gather_from_tensor_model_parallel_region(part)
            found.append(read(whole[:, : self.vocab_size].float() / self.temperature, targets))
        columns = (torch.cat(column) for column in zip(*found, strict=True))
        return tuple(gather_places(t, micro.places, micro.num_responses, self.groups.context_group) for t in columns)

    def values(self, hidden: torch.Tensor, micro: PackedBatch) -> torch.Tensor:
        """Return [R] float32 values of the states before the response tokens."""
        # The value head takes its part of the rows under sequence parallelism and gathers the values (`ValueHead`).
        values, _ = unwrapped(self.chunk).output_layer(hidden)
        values = values.reshape(-1).float().index_select(0, micro.rows)
        return gather_places(values, micro.places, micro.num_responses, self.groups.context_group)

    def output(self, hidden: torch.Tensor, micro: PackedBatch, with_entropy: bool) -> MicroBatchOutput:
        """Return the input of an actor's loss function."""
        log_probs, entropy = self.log_probs(hidden, micro, with_entropy)
        return MicroBatchOutput(micro.positions, log_probs, entropy)

    def output_with_logits(self, hidden: torch.Tensor, micro: PackedBatch, with_entropy: bool) -> MicroBatchOutput:
        """Return the output with the logits of all tokens of the samples, gathered whole on every rank."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        logits = self._output_layer(self._whole(hidden))
        log_probs, entropy = self._from_logits(logits.index_select(0, micro.rows), micro, with_entropy, overwrite=False)
        own = gather_from_tensor_model_parallel_region(logits.index_select(0, micro.token_rows))
        own = own[:, : self.vocab_size].float()
        whole = gather_places(own, micro.token_places, micro.num_tokens, self.groups.context_group)
        return MicroBatchOutput(micro.positions, log_probs, entropy, logits=whole[None])

    def value_output(self, hidden: torch.Tensor, micro: PackedBatch) -> MicroBatchOutput:
        """Return the input of a critic's loss function."""
        values = self.values(hidden, micro)
        return MicroBatchOutput(micro.positions, values.new_empty(0), values=values)

    def _from_logits(
        self, logits: torch.Tensor, micro: PackedBatch, with_entropy: bool, *, overwrite: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        groups = self.groups
        part = VocabularyPart.of_rank(groups.tensor_rank, logits.shape[1], self.vocab_size, groups.tensor_group)
        found = vocab_parallel_log_probs(
            logits,
            micro.targets,
            part,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
            overwrite=overwrite,
            mask=micro.mask,
        )
        log_probs, entropy = (
            None if t is None else gather_places(t, micro.places, micro.num_responses, groups.context_group)
            for t in found
        )
        assert log_probs is not None
        return log_probs, entropy

    def _whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the [T, 1, hidden] states of all rows of this context-parallel rank."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if not unwrapped(self.chunk).config.sequence_parallel:
            return hidden
        # Every tensor-parallel rank gets the whole gradient (the output layer sums it over the ranks), so each rank
        # keeps its rows of the gradient and nothing is reduced.
        whole: torch.Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return whole

    def _output_layer(self, hidden: torch.Tensor) -> torch.Tensor:
        """Convert [n, 1, hidden] states of whole rows to logits [n, this rank's columns]."""
        model = unwrapped(self.chunk)
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        with _on_whole_rows(model.output_layer):
            found: tuple[torch.Tensor, Any] = model.output_layer(hidden, weight=weight)
        return found[0].squeeze(1)


@contextmanager
def _on_whole_rows(layer: Any) -> Iterator[None]:
    """Stop the output layer from gathering its input over sequence-parallel ranks, as it is already gathered."""
    if not getattr(layer, "sequence_parallel", False):
        yield
        return
    before = layer.allreduce_dgrad
    layer.sequence_parallel, layer.allreduce_dgrad = False, True
    try:
        yield
    finally:
        layer.sequence_parallel, layer.allreduce_dgrad = True, before


def gather_places(local: torch.Tensor, places: torch.Tensor, total: int, group: Any | None) -> torch.Tensor:
    """Put every rank's entries where they belong.

    Args:
        local: [n, ...] entries of this rank.
        places: [n] int64 in [0, total): where they go. Over all ranks each place occurs once.
        total: Entries over all ranks.
        group: Context-parallel process group; None for a single rank.

    Returns:
        [total, ...], the same on every rank; its gradient goes to the entries of this rank alone.
    """
    if group is None or dist.get_world_size(group) == 1:
        # One rank has its entries in order: nothing to move.
        assert local.shape[0] == total
        return local
    whole: torch.Tensor = _Gather.apply(local, places, total, group)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, places: torch.Tensor, total: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(places)
        # A sum in which all but one term are zero: exact, and ranks may hold different numbers of entries.
        whole = local.new_zeros((total, *local.shape[1:]))
        whole[places] = local
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None
