"""Run micro-batches through Megatron's pipeline schedule: log-probs, values, and gradients of the caller's loss.

Called by `trainer.py`, inside `on_device`, on every rank with the same micro-batches per data-parallel rank. The last
pipeline stage turns hidden states into per-token results (`heads.py`) and calls the loss. The results are sent back
over the pipeline, so every rank returns the same values.

    stage 0    pack -> embedding -> layers --hidden-->
    stage p-1                       layers -> rows of responses -> output layer -> log-probs -> whole responses -> loss

Gradients are summed. Megatron is told that the loss counts per token (`calculate_per_token_loss`), which makes it
neither average nor scale, and the division that belongs to that setting is left out (`finalize`). All normalisation is
the loss function's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from slime_embedded.trainer.sample_rows import left_out

from slime_core.protocols import LossFn, MicroBatchOutput
from slime_core.sample import TrainBatch
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.step.balancing import router_losses
from slime_trainer_megatron.step.heads import Head, has_router_losses, hidden_states
from slime_trainer_megatron.step.packed import PackedBatch, Packing, pack, pack_nothing
from slime_trainer_megatron.step.routing import MISMATCH, RoutingReplay

Results = Callable[[Head, torch.Tensor, PackedBatch], tuple[torch.Tensor, ...]]
"""Function (head, hidden states, micro-batch) -> [R] tensors."""


@dataclass(frozen=True)
class StepSums:
    """The results of one step's forward and backward passes, the same on every rank."""

    metrics: dict[str, float]
    """Metrics of the loss function, summed over micro-batches and data-parallel ranks."""
    log_probs: dict[int, torch.Tensor]
    """Position in the batch -> [response_length], detached; empty from a critic."""


class Schedule:
    """A model of this rank in the pipeline schedule.

    Args:
        chunks: Model chunks, wrapped for training or bare.
        head: Head after the last layer.
        groups: Process groups of this process.
        packing: Layout of the rows on this rank.
        device: Device of the rows.
    """

    def __init__(
        self, chunks: Sequence[Any], head: Head, groups: ProcessGroups, packing: Packing, device: torch.device
    ) -> None:
        self.chunks, self.head, self._groups = list(chunks), head, groups
        self._packing, self._device = packing, device
        self.config: Any = chunks[0].config

    def results(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        run: Results,
        columns: int | None,
        replay: RoutingReplay | None = None,
    ) -> list[list[torch.Tensor]]:
        """Return the results of `run` for all samples, without gradient: one list of [response_length] per column.

        `columns` is None if only `run` knows how many it returns.

        With a replay the pass uses the experts that the batch names. For tokens without named experts, it records the
        experts that it used in the batch.

        Raises:
            TrainError: The micro-batches leave a sample out, or a sample cannot be packed.
        """
        left_out(batch, micro_batches)
        found: list[tuple[torch.Tensor, ...]] = []

        def after(micro: PackedBatch, hidden: torch.Tensor, **_: Any) -> Any:
            if micro.positions:
                found.append(run(self.head, hidden, micro))
            return {}

        packed = self._packed(batch, micro_batches, replay)
        with torch.no_grad():
            self._set_training(False)
            self._run(packed, after, forward_only=True)
        if replay is not None:
            replay.keep(batch, packed)
        joined = {str(i): torch.cat(parts) for i, parts in enumerate(zip(*found, strict=True))}
        joined = self._over_pipeline(joined)
        columns = len(joined) if columns is None else columns
        order = [position for micro in packed for position in micro.positions]
        lengths = [batch.response_lengths[position] for position in order]
        if not order:
            return [[] for _ in range(columns)]
        parts = [dict(zip(order, torch.split(joined[str(i)], lengths), strict=True)) for i in range(columns)]
        return [[column[i] for i in range(len(batch))] for column in parts]

    def accumulate(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        output: Callable[[Head, torch.Tensor, PackedBatch], MicroBatchOutput],
        replay: RoutingReplay | None = None,
    ) -> StepSums:
        """Run the loss over all micro-batches and accumulate its gradients in the parameters' `main_grad`.

        With a replay the passes use the experts that the batch names, and the metrics include `routing_mismatch`.
        """
        totals: dict[str, torch.Tensor] = {}
        log_probs: list[torch.Tensor] = []

        def after(micro: PackedBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            # Connected to every input, even an unused one, because the schedule needs a backward pass.
            loss = hidden.reshape(-1)[:0].sum().float()
            tokens = torch.zeros((), dtype=torch.int, device=hidden.device)
            if not micro.positions:
                return loss, tokens, {}
            found = output(self.head, hidden, micro)
            own, metrics = loss_fn(found)
            for name, value in metrics.items():
                detached = value.detach().to(self._device, torch.float64).reshape(())
                totals[name] = totals[name] + detached if name in totals else detached
            if found.log_probs.numel() == micro.num_responses:
                log_probs.append(found.log_probs.detach())
            return loss + own, tokens + micro.num_tokens, {}

        packed = self._packed(batch, micro_batches, replay)
        self._set_training(True)
        self._scale_router_losses(packed)
        self._run(packed, after, forward_only=False)
        found = self._shared_sums(packed, totals, log_probs)
        if has_router_losses(self.config):
            losses = router_losses(self.chunks, packed, self._device)
            found = replace(found, metrics=found.metrics | losses)
        return found if replay is None else replace(found, metrics=found.metrics | {MISMATCH: replay.mismatch(packed)})

    def _shared_sums(
        self, packed: Sequence[PackedBatch], totals: dict[str, torch.Tensor], log_probs: list[torch.Tensor]
    ) -> StepSums:
        shared: dict[str, torch.Tensor] = {}
        if self._groups.is_last_stage:
            if totals:
                names = sorted(totals)
                values = self._groups.all_reduce(torch.stack([totals[name] for name in names]))
                shared |= {f"metric.{name}": value for name, value in zip(names, values, strict=True)}
            if log_probs:
                shared["log_probs"] = torch.cat(log_probs)
        shared = self._over_pipeline(shared)
        order = [position for micro in packed for position in micro.positions]
        lengths = [length for micro in packed for length in micro.response_lengths]
        flat = shared.pop("log_probs", None)
        split = [] if flat is None else torch.split(flat, lengths)
        metrics = {name.removeprefix("metric."): float(value) for name, value in shared.items()}
        return StepSums(metrics, dict(zip(order, split, strict=bool(split))))

    # -- the schedule ----------------------------------------------------------------------------------

    def _packed(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]], replay: RoutingReplay | None
    ) -> list[PackedBatch]:
        """Return the packed micro-batches, with idle ones that the schedule and peers in expert parallelism need."""
        packing = self._packing
        packed = [self._pack(batch, positions, packing) for positions in micro_batches]
        if self._needs_equal_lengths and packed:
            packing = replace(packing, least=max(micro.token_ids.shape[1] for micro in packed))
            packed = [self._pack(batch, positions, packing) for positions in micro_batches]
        if replay is not None:
            packed = replay.attach(batch, packed)
        wanted = len(packed)
        if self._groups.expert_size > 1:
            # Experts are on other data-parallel ranks, which wait for this rank in every layer.
            count = torch.tensor([wanted], device=self._device)
            dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._groups.data_group)
            wanted = int(count.item())
        multiple = self._groups.layout.micro_batch_multiple
        wanted = -(-wanted // multiple) * multiple
        return packed + [pack_nothing(packing, self._device)] * (wanted - len(packed))

    def _pack(self, batch: TrainBatch, positions: Sequence[int], packing: Packing) -> PackedBatch:
        return pack(batch, positions, self.head.vocab_size, packing, self._device)

    @property
    def _needs_equal_lengths(self) -> bool:
        """Return True if the schedule is interleaved, which cannot use micro-batches of different lengths.

        With two stages both neighbours are the same process. It confuses the sizes that are sent in the two directions
        (pipeline_parallel/p2p_communication.py `_communicate_shapes`), and the pipeline waits forever.
        """
        return bool(self._groups.layout.virtual)

    def _run(self, packed: Sequence[PackedBatch], after: Callable[..., Any], *, forward_only: bool) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not packed:
            return

        def forward_step(micro_batches: Iterator[PackedBatch], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            micro = next(micro_batches)
            return hidden_states(chunk, micro), partial(after, micro)

        # Stages exchange tensors of this length, unless the size is sent first.
        self.config.variable_seq_lengths = not self._needs_equal_lengths
        iterators = [iter(packed) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(packed),
            seq_length=packed[0].token_ids.shape[1] * self._groups.context_size,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def _over_pipeline(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._groups.pipeline_size == 1:
            return tensors
        found = self._groups.tensors_over_pipeline(tensors if self._groups.is_last_stage else None)
        return {name: tensor.to(self._device) for name, tensor in found.items()}

    def _scale_router_losses(self, packed: Sequence[PackedBatch]) -> None:
        """Make the routers' own losses (`--moe-aux-loss-coeff`) a mean over the step's tokens.

        Megatron weights each loss by its micro-batch's tokens and expects gradients to be divided by all tokens at the
        end (transformer/moe/router.py `attach_and_log_load_balancing_loss`). This trainer does not divide at the end,
        so it scales the losses when the schedule requests their scale.
        """
        if not self.config.num_moe_experts:
            return
        tokens = torch.tensor([float(sum(micro.num_tokens for micro in packed))], device=self._device)
        scale = 1.0 / max(float(self._groups.all_reduce(tokens)), 1.0)
        self.config.grad_scale_func = partial(_router_loss_scale, scale)


def _router_loss_scale(scale: float, tensor: torch.Tensor) -> torch.Tensor:
    """Scale the constant 1 of router losses; leave a micro-batch's loss, which the schedule also passes, unchanged."""
    return tensor if tensor.requires_grad else tensor * scale


def finalize(chunks: list[Any], num_tokens: Any = None, **keywords: Any) -> None:
    """Run Megatron's `finalize_model_grads` (sums over ranks) without the division by the number of tokens."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(chunks, None, **keywords)
