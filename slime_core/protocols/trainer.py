"""The `Trainer` protocol, and the types that it exchanges with a loss function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from slime_core.sample import TrainBatch

if TYPE_CHECKING:
    import torch


@dataclass
class MicroBatchOutput:
    """The results of a trainer's forward pass over one micro-batch: concatenated response tokens, [T]."""

    positions: list[int]
    """Positions of the samples in the batch, in order."""
    log_probs: torch.Tensor
    """float32 log-probs of the temperature-scaled distribution; empty from a critic."""
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """float32 values of the states before each response token, from a critic."""
    logits: torch.Tensor | None = None
    """float32 logits [1, tokens of the samples including prompts, vocabulary], not divided by the temperature."""


LossFn: TypeAlias = "Callable[[MicroBatchOutput], tuple[torch.Tensor, dict[str, torch.Tensor]]]"
"""Micro-batch -> (scalar whose gradients are summed over micro-batches and ranks, metrics to be summed likewise).

The function does all normalisation: the sum over every micro-batch of every rank is the loss of the step."""


@dataclass
class StepResult:
    """The result of one optimizer step of a trainer; the same on every process that takes part in a rank's step."""

    metrics: dict[str, float]
    """The summed metrics of the loss function, `grad_norm`, `lr`, and further metrics of the trainer."""
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Position in the local batch -> detached [response_length] log-probs of the step's own forward pass, with the
    weights before the step. Has every position of the step's micro-batches. Empty from a critic."""
    log_prob_grads: dict[int, torch.Tensor] = field(default_factory=dict)
    """Position -> propagated gradient of the step's loss with respect to those log-probs; empty if the trainer does
    not keep it."""


class Trainer(Protocol):
    """The model and optimizer of one role on this process.

    Constructed as `cls(args)`, or `cls(args, role="critic")` if the estimator needs values. The actor is constructed
    first, in the same process, so that both share one process group. A critic starts from `args.critic_load` (if unset:
    from `args.hf_checkpoint`, with a new head), learns at `args.critic_lr` (if unset: at `args.lr`), has `values`
    instead of `log_probs`, and has neither reference nor teacher. A batch holds only this rank's samples;
    `micro_batches` are lists of positions in it.

    Every process makes the same calls in the same order. `rank` and `world_size` count data-parallel ranks: processes
    that share one model replica (tensor, pipeline, context parallelism) have the same rank, get the same local batch
    and return the same results. Only the process with torch's rank 0 writes and pushes.

    The class declares further abilities as `traits = TrainerTraits(...)` (`slime_core.protocols.traits`). Optional
    attributes, with their default values:

    - `micro_batch_multiple: int` (instance, 1): a step has a multiple of that many micro-batches on every rank.
    - `weight_probes() -> Tensor` (instance, none): some of the trained weights, always the same, for the metric
      `train/update_ratio`.
    - `over_logits(batch, micro_batches, read, *, role) -> list[list[Tensor]]` (none): for each tensor of
      `read(logits, targets)` the list of its parts per sample, without gradient. `read` maps float32 logits [rows,
      vocabulary], divided by the temperature, and the rows' tokens to tensors [rows, ...]; for losses that read a
      teacher's distributions.
    - `context_parallel_size: int` (instance, 1): number of processes that share one micro-batch, so that its limit is
      that many times `--max-tokens-per-gpu`.
    - `decoder_shape(directory) -> ops.flops.DecoderShape` and `routed_layers(directory) -> models.family.
      RoutedLayers` (static methods): of a model in HF's layout whose family has no plugin of kind "models".
    - `processes(settings) -> int | None` (classmethod): number of processes that this run needs. The launcher starts
      them if torchrun has not, and refuses any other number from torchrun. None, or no such method: as many as torchrun
      started, else one. Called before anything starts; raises ConfigError.
    - `tokens_that_fit(args, processes) -> int` (classmethod): default of `--max-tokens-per-gpu`, the same on every
      process; 4096 without this method.

    A trainer that shares devices with engines has two more methods, and "offload_train" in its `uses`; the launcher
    calls them on every process under `--offload-train`:

    - `offload()`: free the memory that only training needs: drop gradients and move the optimizer's state off the
      device. Returns when every process has done so. Until `onload` only `named_weights`, `update_old_actor`, `save`,
      `load`, `broadcast`, `all_reduce` and `close` are called, and their results do not change.
    - `onload()`: move the state back; training continues with the same bits. Both methods are safe twice.
    """

    rank: int
    """Data-parallel rank."""
    world_size: int
    """Data-parallel size."""
    device: torch.device

    def log_probs(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        *,
        role: Literal["actor", "ref", "teacher", "old_actor"] = "actor",
    ) -> list[torch.Tensor]:
        """Return log-probs, [response_length] float32 per sample of the batch, without gradient.

        "ref" is `args.ref_load`, "teacher" `args.opd_teacher_load`, and "old_actor" the actor at the last
        `update_old_actor`, under `args.keep_old_actor`.
        """

    def log_probs_and_entropy(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the actor's `log_probs` and the entropy in nats of each token's distribution, in one pass."""

    def values(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return a critic's values, [response_length] float32 per sample, without gradient; ignores the temperature."""

    def train_step(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        *,
        with_entropy: bool = False,
        with_logits: bool = False,
    ) -> StepResult:
        """Run one optimizer step over the micro-batches of all ranks, with the summed gradients of `loss_fn`.

        `with_entropy` and `with_logits` fill those fields of `MicroBatchOutput`, differentiable; a critic fills
        `values`.
        """

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over data-parallel ranks."""

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return the bytes of torch's rank 0 on every process."""

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield HF names and tensors of the actor, in HF layout; collective if the traits declare it."""

    def update_reference(self) -> None:
        """Copy the actor's weights into the reference."""

    def update_old_actor(self) -> None:
        """Copy the actor's weights into the old actor; called when engines begin to serve them.

        Only called with `args.keep_old_actor`. Before the first call the old actor has the actor's loaded weights.
        """

    def save(self, directory: Path) -> None:
        """Write HF-layout weights to `directory`, and all other state for a resume to `directory/trainer`.

        Called on every process with the same shared directory; returns when every process has written.
        """

    def load(self, directory: Path) -> None:
        """Restore the state that `save` wrote, bit for bit. Raises CheckpointError."""

    def close(self) -> None:
        """Leave process groups and free memory."""
