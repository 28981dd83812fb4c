"""The default trainer: one HF-layout decoder in plain torch per process, data parallel, on CPU or CUDA.

The loop builds it from `args` and calls it through `protocols.Trainer`; it turns packed micro-batches into
log-probs, a caller-given loss into one AdamW step, and itself into a checkpoint. It knows no algorithm.
What a reader would get wrong: parameters are float32 always; bfloat16 is what matrix products are computed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from slime_core.errors import ConfigError, TrainError
from slime_core.models.config import load_model_config
from slime_core.models.decoder import Decoder
from slime_core.models.hf_io import read_weights
from slime_core.ops.logprobs import token_log_probs
from slime_core.protocols import LossFn, MicroBatchOutput
from slime_core.trainers.embedded import state
from slime_core.trainers.embedded.microbatch import MicroBatch, pack
from slime_core.trainers.embedded.optimizer import AdamSettings, FlatAdamW
from slime_core.trainers.embedded.parallel import DataParallel
from slime_core.trainers.embedded.schedule import LearningRateSchedule
from slime_core.trainers.embedded.settings import TrainerSettings
from slime_core.types import TrainBatch


class EmbeddedTrainer:
    """Implements `protocols.Trainer`; every data-parallel process constructs one and makes the same calls.

    Args:
        args: The run's settings; `settings.py`, `schedule.py` and `optimizer.py` say which are read.

    Raises:
        ConfigError: A setting cannot be honoured here.
        CheckpointError: The weights do not fit their `config.json`.
    """

    def __init__(self, args: Any) -> None:
        self.settings = settings = TrainerSettings.from_args(args)
        # Settings are read before any process group is joined, so a mistake ends the run at once.
        schedule, adam = LearningRateSchedule.from_args(args), AdamSettings.from_args(args)
        self.config = load_model_config(settings.hf_checkpoint)
        self._parallel = DataParallel(settings.device, settings.timeout_minutes, settings.distributed_backend)
        self.rank, self.world_size = self._parallel.rank, self._parallel.world_size
        self.device = self._parallel.device
        self.compute_dtype = settings.compute_dtype(self.device)
        self.actor = self._load_decoder(settings.hf_checkpoint)
        self.optimizer = FlatAdamW(self._trained_parameters(), adam, schedule, self._parallel)
        self.reference = self._load_reference()
        self._reference_moved = False
        self._last_rollout: int | None = None

    def _load_decoder(self, directory: str) -> Decoder:
        weights = read_weights(directory, self.device)
        return Decoder.from_weights(
            self.config, weights, self.device, recompute=self.settings.recompute, origin=directory
        )

    def _load_reference(self) -> Decoder | None:
        if self.settings.ref_checkpoint is None:
            return None
        return self._load_decoder(self.settings.ref_checkpoint).requires_grad_(False)

    def _trained_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters to optimize; freezes the others."""
        if self.settings.only_train and self.settings.freeze:
            raise ConfigError("--only-train-params-name-list and --freeze-params-name-list: give one of the two")
        trained = []
        for name, parameter in self.actor.named_parameters():
            parameter.requires_grad_(self.settings.trains(name))
            if parameter.requires_grad:
                trained.append((name, parameter))
        if not trained:
            flag = "--only-train-params-name-list" if self.settings.only_train else "--freeze-params-name-list"
            raise ConfigError(f"{flag}: no parameter is left to train; names look like {name}")
        return trained

    # -- forward and step ----------------------------------------------------------------------------

    def log_probs(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        *,
        role: Literal["actor", "ref", "teacher"] = "actor",
    ) -> list[torch.Tensor]:
        """[response_length] float32 log-probs per sample of the batch, no gradient.

        Raises:
            TrainError: The role has no model here, or the micro-batches leave a sample out.
        """
        model = self._model_of(role)
        results: list[torch.Tensor | None] = [None] * len(batch)
        with torch.no_grad():
            for positions in micro_batches:
                micro = pack(batch, positions, self.config.vocab_size, self.device)
                values, _ = self._forward(model, micro, with_entropy=False)
                for i, part in zip(micro.positions, torch.split(values, micro.response_lengths), strict=True):
                    results[i] = part
        left_out = [i for i, result in enumerate(results) if result is None]
        if left_out:
            raise TrainError(f"rollout {batch.rollout_id}: samples at {left_out[:10]} are in no micro-batch")
        return [result for result in results if result is not None]

    def train_step(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]], loss_fn: LossFn, *, with_entropy: bool = False
    ) -> dict[str, float]:
        """One optimizer step over all micro-batches of all ranks.

        Args:
            batch: This rank's samples.
            micro_batches: Positions in the batch; those not named take no part in the step. Ranks may differ in
                number, but every rank needs at least one.
            loss_fn: Called once per micro-batch; must return the same metric names on every rank.
            with_entropy: Fill `MicroBatchOutput.entropy`, differentiable.

        Returns:
            The metrics of `loss_fn` summed over micro-batches and ranks, `grad_norm` before clipping, `lr`, and
            `skipped_steps` (1 when the gradients were not finite and nothing was changed).

        Raises:
            TrainError: No micro-batch, or gradients not finite in several steps in a row.
        """
        if not micro_batches:
            raise TrainError(f"rollout {batch.rollout_id}: an optimizer step without micro-batches on rank {self.rank}")
        if self.settings.reset_optimizer_states and batch.rollout_id != self._last_rollout:
            self.optimizer.reset_moments()
        self._last_rollout = batch.rollout_id
        self.optimizer.zero_grad()
        totals: dict[str, torch.Tensor] = {}
        for positions in micro_batches:
            micro = pack(batch, positions, self.config.vocab_size, self.device)
            log_probs, entropy = self._forward(self.actor, micro, with_entropy)
            loss, metrics = loss_fn(MicroBatchOutput(micro.positions, log_probs, entropy))
            if loss.requires_grad:
                torch.autograd.backward(loss)
            for name, value in metrics.items():
                detached = value.detach().to(self.device, torch.float64)
                totals[name] = totals[name] + detached if name in totals else detached
        return {**self._summed(totals), **self.optimizer.step()}

    def _forward(
        self, model: Decoder, micro: MicroBatch, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[R] log-probs of the response tokens of the temperature-scaled distribution, and their entropy."""
        with self._compute():
            hidden = model.hidden(micro.token_ids, micro.lengths, rows=micro.rows)
        return token_log_probs(
            hidden.to(self.compute_dtype),
            model.head_weight,
            micro.targets,
            temperature=self.settings.temperature,
            chunk_size=self.settings.log_probs_chunk_size,
            with_entropy=with_entropy,
        )

    @contextmanager
    def _compute(self) -> Iterator[None]:
        if self.compute_dtype == torch.float32:
            yield
        else:
            with torch.autocast(self.device.type, dtype=self.compute_dtype):
                yield

    def _summed(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        if not totals:
            return {}
        names = sorted(totals)
        values = self._parallel.all_reduce(torch.stack([totals[name].reshape(()) for name in names]))
        return dict(zip(names, values.tolist(), strict=True))

    # -- peers ---------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over data-parallel ranks, as a new tensor."""
        return self._parallel.all_reduce(tensor)

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; the others pass None."""
        return self._parallel.broadcast(payload)

    # -- weights -------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF names and float32 tensors of the actor; a tied output layer is left out, as HF does.

        The tensors are the live parameters: copy what must outlast the next step.
        """
        for name, parameter in self.actor.named_parameters():
            yield name, parameter.detach()

    def update_reference(self) -> None:
        """Copy the actor's weights into the reference. Raises TrainError when the run has no reference."""
        reference = self._model_of("ref")
        with torch.no_grad():
            for target, source in zip(reference.parameters(), self.actor.parameters(), strict=True):
                target.copy_(source)
        self._reference_moved = True

    def _model_of(self, role: str) -> Decoder:
        if role == "actor":
            return self.actor
        if role == "ref" and self.reference is not None:
            return self.reference
        hint = "; it is loaded when --kl-coef is not 0 or --use-kl-loss is given" if role == "ref" else ""
        raise TrainError(f"this run has no {role!r} model{hint}")

    # -- checkpoints ---------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the HF-layout model and, under `directory/trainer`, all that `load` needs; returns on all ranks
        when every rank has written. The directory must be one that all ranks see."""
        directory = Path(directory)
        if self.rank == 0:
            weights = dict(self.named_weights())
            settings = self.settings
            state.save_model(directory, weights, self.config, settings.hf_checkpoint, settings.save_dtype)
            if self.reference is not None and self._reference_moved:
                state.save_reference(directory, _tensors(self.reference))
        state.save_progress(directory, self.optimizer, self.settings, self.rank, self.world_size)
        self._parallel.barrier()

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, bit for bit; `--finetune` takes the weights only.

        Raises:
            CheckpointError: The checkpoint is not whole or does not fit this run.
        """
        directory = Path(directory)
        if not self.settings.finetune:
            state.load_progress(directory, self.optimizer, self.settings, self.rank, self.world_size)
        state.load_model(directory, _tensors(self.actor))
        if self.reference is not None and not self.settings.finetune:
            self._reference_moved = state.load_reference(directory, _tensors(self.reference))

    def close(self) -> None:
        """Leave the process group; safe to call twice. The trainer takes no steps afterwards."""
        self._parallel.close()


def _tensors(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
