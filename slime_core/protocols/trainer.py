"""What trains: `Trainer`, and what it gives to a loss and gets from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from slime_core.types import TrainBatch

if TYPE_CHECKING:
    import torch


@dataclass
class MicroBatchOutput:
    """A trainer's forward pass over one micro-batch: response tokens laid end to end, [T]."""

    positions: list[int]
    """Which samples of the batch, in order."""
    log_probs: torch.Tensor
    """float32, of the temperature-scaled distribution; empty from a critic."""
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """float32, from a critic: the value of the state before each response token."""
    logits: torch.Tensor | None = None
    """float32 [1, tokens of the samples, prompts included, vocabulary], not divided by the temperature."""


LossFn: TypeAlias = "Callable[[MicroBatchOutput], tuple[torch.Tensor, dict[str, torch.Tensor]]]"
"""Micro-batch -> (scalar whose gradients are summed over micro-batches and ranks, metrics to be summed likewise).

All normalisation is inside: the sum over every micro-batch of every rank is the loss of the step."""


@dataclass
class StepResult:
    """What one optimizer step of a trainer gives back; the same on every process that takes part in a rank's step."""

    metrics: dict[str, float]
    """The summed metrics of the loss function, `grad_norm`, `lr`, and what else the trainer reports."""
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Position in the local batch -> detached [response_length] log-probs of the step's own forward pass, which the
    weights before the step gave; of every position the step's micro-batches name. Empty from a critic."""
    log_prob_grads: dict[int, torch.Tensor] = field(default_factory=dict)
    """Position -> gradient of the step's loss by those log-probs, as it was propagated; empty if the trainer does not
    keep it."""


class Trainer(Protocol):
    """One role's model and optimizer on this process.

    Constructed as `cls(args)`, or `cls(args, role="critic")` where the estimator needs values: the actor first, in
    one process, so that both share one process group. A critic starts from `args.critic_load` (without: from
    `args.hf_checkpoint`, with a new head), learns at `args.critic_lr` (without: at `args.lr`), answers `values` instead
    of `log_probs`, and has neither reference nor teacher. A batch given to a trainer holds this rank's samples only;
    `micro_batches` are lists of positions in it.

    Every process makes the same calls in the same order. `rank` and `world_size` count data-parallel ranks: processes
    that share one model replica (tensor, pipeline, context parallelism) have the same rank, get the same local batch
    and answer the same. The launcher makes one process of them, the one of torch's rank 0, write and push.

    What it can do beyond its methods is declared by its class as `traits = TrainerTraits(...)`
    (`slime_core.protocols.traits`). Optional attributes, with the value taken without them:

    - `micro_batch_multiple: int` (instance, 1): a step has a multiple of that many micro-batches on every rank.
    - `weight_probes() -> Tensor` (instance, none): some of the trained weights, the same ones each time, for the metric
      `train/update_ratio`.
    - `context_parallel_size: int` (instance, 1): one micro-batch is spread over that many processes, so that
      `--max-tokens-per-gpu` counts as many times.
    - `decoder_shape(directory) -> ops.flops.DecoderShape` and `routed_layers(directory) -> models.family.
      RoutedLayers` (static methods): of a model in HF's layout whose family has no plugin of kind "models".
    - `processes(settings) -> int | None` (classmethod): how many processes this run needs; the launcher starts them
      when torchrun has not, and refuses another number of torchrun's. None, and no such method: as many as torchrun
      started, else one. Called before anything starts; raises ConfigError.
    - `tokens_that_fit(args, processes) -> int` (classmethod): `--max-tokens-per-gpu` where nobody gives it, the same on
      every process; 4096 without.

    A trainer that shares devices with engines has two more methods, and "offload_train" in what it `uses`; the launcher
    calls them on every process under `--offload-train`:

    - `offload()`: give up what only training needs: gradients, and the optimizer's state off the device. Returns when
      every process has. Until `onload` only `named_weights`, `update_old_actor`, `save`, `load`, `broadcast`,
      `all_reduce` and `close` are called, and give the same as ever.
    - `onload()`: take it again; training goes on with the same bits. Both are safe twice.
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
        """[response_length] float32 per sample of the batch, no gradient.

        "ref" is `args.ref_load`, "teacher" `args.opd_teacher_load`, and "old_actor" the actor at the last
        `update_old_actor`, under `args.keep_old_actor`.
        """

    def log_probs_and_entropy(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`log_probs` of the actor and the entropy in nats of the distribution of each token, in one pass."""

    def values(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """A critic's [response_length] float32 per sample of the batch, no gradient; the temperature plays no part."""

    def train_step(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        *,
        with_entropy: bool = False,
        with_logits: bool = False,
    ) -> StepResult:
        """One optimizer step over the micro-batches of all ranks, with the summed gradients of `loss_fn`.

        `with_entropy` and `with_logits` fill those fields of `MicroBatchOutput`, differentiable; a critic fills
        `values`.
        """

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over data-parallel ranks."""

    def broadcast(self, payload: bytes | None) -> bytes:
        """The bytes of torch's rank 0 on every process."""

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """HF names and tensors of the actor, in HF layout; collective where the traits say so."""

    def update_reference(self) -> None:
        """Copy the actor's weights into the reference."""

    def update_old_actor(self) -> None:
        """Copy the actor's weights into the old actor; called when they begin to be served, if `args.keep_old_actor`.

        Before the first call the old actor has the weights that the actor was loaded with.
        """

    def save(self, directory: Path) -> None:
        """Write HF-layout weights to `directory` and everything else needed to go on to `directory/trainer`.

        Called on every process with the same directory, which all of them see; returns when every one has written.
        """

    def load(self, directory: Path) -> None:
        """Inverse of `save`, bit for bit. Raises CheckpointError."""

    def close(self) -> None:
        """Leave process groups and free memory."""
