"""The scalable trainer: a decoder in megatron-core, split over tensor, pipeline, context, expert and data ranks.

The launcher builds it from `args` on every rank, once for the actor and once for a critic, and calls it through
`protocols.Trainer`, with the same calls in the same order on every rank. The trainer combines the parts of this package
and contains no arithmetic itself. `rank` and `world_size` are data-parallel; all tensor, pipeline and context peers of
a data-parallel rank get the same batch and return the same results.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from slime_embedded.trainer.sample_rows import left_out
from slime_embedded.trainer.schedule import LearningRateSchedule
from slime_embedded.trainer.shared_settings import Role
from slime_embedded.trainer.teachers import TEACHER, check_teachers

from slime_core.errors import TrainError, rollout_name
from slime_core.models.config import read_hf_config
from slime_core.plugins.hooks import Hooks, bare_manager, implement
from slime_core.plugins.kinds import hook_flags
from slime_core.plugins.resolve import resolve
from slime_core.protocols import Args, LossFn, MicroBatchOutput, StepResult, TrainerTraits
from slime_core.sample import TrainBatch
from slime_trainer_megatron.arguments.architecture import check_architecture
from slime_trainer_megatron.arguments.config import ddp_config, optimizer_config
from slime_trainer_megatron.checkpoints import checkpoint
from slime_trainer_megatron.checks import check_run
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.families.family import load_megatron_model
from slime_trainer_megatron.families.shape import decoder_shape, routed_layers
from slime_trainer_megatron.hookspecs import HOOK_SETTINGS, STORE_PREFIXES, model_provider
from slime_trainer_megatron.installed import missing
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.roles import Models
from slime_trainer_megatron.settings import MegatronSettings
from slime_trainer_megatron.step.balancing import expert_biases
from slime_trainer_megatron.step.heads import Head, ReadLogits
from slime_trainer_megatron.step.optimizer import MegatronAdam, wrap_for_training
from slime_trainer_megatron.step.packed import PackedBatch
from slime_trainer_megatron.step.routing import RoutingReplay
from slime_trainer_megatron.weights.weights_out import hf_weights


class MegatronTrainer:
    """Implements `protocols.Trainer`.

    Args:
        args: The run's settings; `settings.py`, `layout.py` and `config.py` say which are read.
        role: "actor", or "critic" for the value model.

    Raises:
        ConfigError: A setting cannot be honoured here.
        CheckpointError: The weights do not fit their `config.json`.
    """

    traits = TrainerTraits(
        collective_weights=True,
        reads_megatron=True,
        routing_replay=True,
        sampling_mask=True,
        uses=frozenset(
            {
                "actor_num_gpus_per_node",
                "actor_num_nodes",
                "data_pad_size_multiplier",
                "keep_old_actor",
                "lora_alpha",
                "lora_dropout",
                "lora_rank",
                "lora_target_modules",
                "offload_train",
                "padded_vocab_size",
                "recompute_granularity",
                *HOOK_SETTINGS,
            }
        ),
    )
    decoder_shape = staticmethod(decoder_shape)
    routed_layers = staticmethod(routed_layers)

    def __init__(self, args: Args, *, role: Role = "actor", hooks: Hooks | None = None) -> None:
        """Build the trainer; `hooks`: the process's hooks, by default the functions named by the settings."""
        self.args, self.role = args, role
        # Settings are read before any process group is joined, so a mistake ends the run at once.
        self.settings = settings = _laid_out(args, MegatronSettings.from_args(args, role))
        schedule = LearningRateSchedule.from_args(args, critic=role == "critic")
        self._hooks = _hooks_of(args) if hooks is None else hooks
        self._model_provider = model_provider(args)
        self.groups = ProcessGroups(
            settings.layout,
            settings.device,
            settings.timeout_minutes,
            settings.distributed_backend,
            seed=args.seed,
        )
        self.device = self.groups.device
        self.rank, self.world_size = self.groups.data_rank, self.groups.data_size
        self.micro_batch_multiple = settings.layout.micro_batch_multiple
        self.context_parallel_size = settings.layout.context
        try:
            with self._on_device():
                self._build(schedule)
        except BaseException:
            self.groups.close()
            raise
        self._last_rollout: int | None = None
        self._step_of_rollout = 0
        self.reference_moved = False
        """True if the reference differs from `--ref-load`, so that checkpoints must contain it."""

    def _build(self, schedule: LearningRateSchedule) -> None:
        args, role = self.args, self.role
        if role == "actor":
            self._hooks.slime_megatron_init(args=args)
        self.models = Models(args, self.settings, self.groups, role, self._model_provider)
        self._replay: RoutingReplay | None = None
        if role == "actor" and self.models.config.num_moe_experts:
            self._replay = RoutingReplay(self.models.chunks, self.groups)
        ddp = ddp_config(args, role=role, device=self.device)
        self.chunks: list[Any] = wrap_for_training(self.models.chunks, self.models.config, ddp)
        """Trained model chunks in Megatron's wrappers; hooks receive them."""
        optimizer = optimizer_config(args, role=role, device=self.device)
        stateless = args.use_stateless_adam
        self.optimizer = MegatronAdam(self.chunks, optimizer, schedule, stateless=stateless)
        self._schedule = self.models.schedule(self.chunks)

    def _on_device(self) -> AbstractContextManager[None]:
        return on_device(self.device)

    # -- settings --------------------------------------------------------------------------------------

    @classmethod
    def missing(cls, args: Args) -> str:
        """Return the missing packages and the install command; empty if Megatron is installed."""
        return missing()

    @classmethod
    def check_settings(cls, settings: Any) -> list[str]:
        """Return warnings. Raises ConfigError for settings that would fail later, PluginError for a model provider."""
        model_provider(settings.args)
        check_teachers(settings, reads_megatron=True)
        return check_run(settings.args)

    @classmethod
    def processes(cls, settings: Any) -> int | None:
        """Return the number of processes: the requested GPUs, else the GPUs of one copy of the model.

        Raises:
            ConfigError: The GPUs cannot be split into copies of the model.
        """
        args: Args = settings.args
        layout = Layout.from_args(args)
        if settings.is_given("actor_num_nodes") or settings.is_given("actor_num_gpus_per_node"):
            asked = args.actor_num_nodes * args.actor_num_gpus_per_node
            layout.data_size(asked)
            return asked
        return layout.model_size

    # -- forward ---------------------------------------------------------------------------------------

    def log_probs(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        *,
        role: Literal["actor", "ref", "teacher", "old_actor"] = "actor",
    ) -> list[torch.Tensor]:
        """Return float32 log-probs [response_length] per sample of the batch, without gradient.

        Raises:
            TrainError: The role has no model here, or the micro-batches leave a sample out.
        """

        def run(head: Head, hidden: torch.Tensor, micro: PackedBatch) -> tuple[torch.Tensor, ...]:
            return head.log_probs(hidden, micro, False)[:1]

        return self._pass(batch, micro_batches, run, 1, role)[0]

    def log_probs_and_entropy(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the actor's `log_probs`, and entropies in nats in the same shapes. Raises as `log_probs`."""

        def run(head: Head, hidden: torch.Tensor, micro: PackedBatch) -> tuple[torch.Tensor, ...]:
            log_probs, entropy = head.log_probs(hidden, micro, True)
            assert entropy is not None
            return log_probs, entropy

        log_probs, entropies = self._pass(batch, micro_batches, run, 2, "actor")
        return log_probs, entropies

    def over_logits(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]], read: ReadLogits, *, role: str = "actor"
    ) -> list[list[torch.Tensor]]:
        """Return the results of `read` per sample; see `protocols.Trainer`. Raises as `log_probs`."""

        def run(head: Head, hidden: torch.Tensor, micro: PackedBatch) -> tuple[torch.Tensor, ...]:
            return head.over_logits(hidden, micro, read)

        return self._pass(batch, micro_batches, run, None, role)

    def values(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return float32 values [response_length] per sample of the batch, without gradient.

        Raises:
            TrainError: This trainer has no critic, or the micro-batches leave a sample out.
        """
        if self.role != "critic":
            raise TrainError("this trainer has no 'critic' model; it is built with role='critic'")

        def run(head: Head, hidden: torch.Tensor, micro: PackedBatch) -> tuple[torch.Tensor, ...]:
            return (head.values(hidden, micro),)

        with self._on_device():
            return self._schedule.results(batch, micro_batches, run, 1)[0]

    def _pass(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]], run: Any, columns: int | None, role: str
    ) -> list[list[torch.Tensor]]:
        with self._on_device():
            self.optimizer.sync_parameters()
            teachers = self.settings.teachers
            roles = teachers.by_role(batch, micro_batches) if role == TEACHER and teachers.roles else {}
            if len(roles) <= 1:
                return self._pass_of(role, role, batch, micro_batches, run, columns)
            found: dict[int, list[torch.Tensor]] = {}
            for each, parts in roles.items():
                places = sorted(place for part in parts for place in part)
                number = {place: i for i, place in enumerate(places)}
                local = [[number[place] for place in part] for part in parts]
                results = self._pass_of(each, role, batch.select(places), local, run, columns)
                found.update(zip(places, map(list, zip(*results, strict=True)), strict=bool(results)))
            left_out(batch, micro_batches)
            return [list(column) for column in zip(*(found[i] for i in range(len(batch))), strict=True)]

    def _pass_of(
        self,
        model: str,
        role: str,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        run: Any,
        columns: int | None,
    ) -> list[list[torch.Tensor]]:
        with self.models.of_role(model, self._schedule) as schedule:
            prefix = STORE_PREFIXES.get(role, f"{role}_")
            self._hooks.slime_megatron_before_log_prob(args=self.args, model=schedule.chunks, store_prefix=prefix)
            replay = self._replay_of(batch) if role in ("actor", "old_actor") else None
            return schedule.results(batch, micro_batches, run, columns, replay)

    def _replay_of(self, batch: TrainBatch) -> RoutingReplay | None:
        """Return the routing replay, or None if the batch or the model has no experts."""
        return None if batch.routed_experts is None else self._replay

    # -- step ------------------------------------------------------------------------------------------

    def train_step(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        *,
        with_entropy: bool = False,
        with_logits: bool = False,
    ) -> StepResult:
        """Run an optimizer step over all micro-batches of all ranks.

        Args:
            batch: This data-parallel rank's samples.
            micro_batches: Positions in the batch; other samples do not take part in the step. Every rank needs at least
                one micro-batch.
            loss_fn: Called once per micro-batch on the ranks of the last pipeline stage; must return the same metric
                names in every micro-batch.
            with_entropy: Fill `MicroBatchOutput.entropy`, differentiable.
            with_logits: Fill `MicroBatchOutput.logits`, differentiable: as much memory as tokens x vocabulary on every
                rank of the last stage.

        Returns:
            The metrics of `loss_fn` summed over micro-batches and data-parallel ranks, `grad_norm` before clipping,
            `lr`, `skipped_steps` (1 if the gradients were not finite and no parameter changed), with routing replay
            `routing_mismatch` (see `routing.py`), and the log-probs of the forward pass.

        Raises:
            TrainError: No micro-batch, or gradients not finite in several steps in a row.
        """
        if not micro_batches:
            raise TrainError(
                f"{rollout_name(batch.rollout_id)}: an optimizer step without micro-batches on rank {self.rank}"
            )
        with self._on_device():
            self._begin_step(batch)
            biases = expert_biases(self.models.chunks)
            kept = [bias.clone() for bias in biases]

            def output(head: Head, hidden: torch.Tensor, micro: PackedBatch) -> MicroBatchOutput:
                if self.role == "critic":
                    return head.value_output(hidden, micro)
                make = head.output_with_logits if with_logits else head.output
                return make(hidden, micro, with_entropy)

            found = self._schedule.accumulate(batch, micro_batches, loss_fn, output, self._replay_of(batch))
            done = self.optimizer.step()
            if done["skipped_steps"]:
                for bias, before in zip(biases, kept, strict=True):
                    bias.copy_(before)
            return StepResult({**found.metrics, **done}, found.log_probs)

    def _begin_step(self, batch: TrainBatch) -> None:
        if batch.rollout_id != self._last_rollout:
            self._last_rollout, self._step_of_rollout = batch.rollout_id, 0
            if self.settings.reset_optimizer_states:
                self.optimizer.reset_moments()
        self.optimizer.zero_grad()
        self._hooks.slime_megatron_before_train_step(
            args=self.args,
            rollout_id=batch.rollout_id,
            step_id=self._step_of_rollout,
            model=self.chunks,
            optimizer=self.optimizer.optimizer,
            opt_param_scheduler=self.optimizer.scheduler,
        )
        self._step_of_rollout += 1

    def weight_probes(self) -> torch.Tensor:
        """Return some of the weights that this rank updates."""
        return self.optimizer.weight_probes()

    # -- peers -----------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over data-parallel ranks, as a new tensor."""
        return self.groups.all_reduce(tensor)

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return the bytes of torch's rank 0 on every process; other ranks pass None."""
        return self.groups.broadcast(payload)

    # -- weights ---------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield HF names and tensors, with adapters merged, in the dtype of the parameters.

        Collective: every process iterates to the end, and only torch's rank 0 gets pairs. The tensors may be views of
        the live parameters: copy a tensor that must outlast the next step.
        """
        with self._on_device():
            self.optimizer.sync_parameters()
        yield from hf_weights(self.models.chunks, self.models.family, what=self.models.exported)

    def update_reference(self) -> None:
        """Copy the actor's weights into the reference. Raises TrainError if the run has no reference."""
        self._keep("ref")
        self.reference_moved = True

    def update_old_actor(self) -> None:
        """Copy the actor's weights into the old actor. Raises TrainError without `--keep-old-actor`."""
        self._keep("old_actor")

    def _keep(self, name: str) -> None:
        if name not in self.models.sets:
            raise TrainError(self.models.absent(name))
        with self._on_device():
            self.optimizer.sync_parameters()
            self.models.sets.keep(name)

    # -- checkpoints -----------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the HF-layout model and, under `directory/trainer`, all that `load` needs; returns on all ranks
        when every rank has written. The directory must be one that all ranks see."""
        with self._on_device(), self.optimizer.moments_on_device():
            self.optimizer.sync_parameters()
            checkpoint.save_checkpoint(self, Path(directory))

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, bit for bit in the same layout; `--finetune` takes the weights only.

        Raises:
            CheckpointError: The checkpoint is not whole or does not fit this run.
        """
        with self._on_device(), self.optimizer.moments_on_device():
            checkpoint.load_checkpoint(self, Path(directory))

    def offload(self) -> None:
        """Free the gradient buffers and, on a GPU, move the moments to the host; return when all processes are done.

        Parameters and the optimizer's float32 copies of them stay. A checkpoint takes the moments back for its time.
        """
        with self._on_device():
            self.optimizer.offload()
            self.groups.barrier()

    def onload(self) -> None:
        """Allocate the gradient buffers again, and move the moments back."""
        with self._on_device():
            self.optimizer.onload()

    def close(self) -> None:
        """Leave the process groups, and drop the models, which hold them; safe to call twice.

        A group's threads end with its last reference. Gloo's may abort a process whose interpreter ends before them
        (pytorch#179291).
        """
        self.groups.close()
        self.__dict__ = {"groups": self.groups}
        gc.collect()


def _laid_out(args: Args, settings: MegatronSettings) -> MegatronSettings:
    """Return the settings with the model's layers assigned to pipeline stages.

    Raises:
        ConfigError: Flags contradict `config.json`, or the model cannot be split like this.
    """
    architecture = load_megatron_model(settings.hf_checkpoint).architecture
    check_architecture(args, read_hf_config(settings.hf_checkpoint), architecture)
    layout = Layout.from_args(args, architecture.num_layers)
    layout.check_model(architecture.transformer)
    return replace(settings, layout=layout)


def _hooks_of(args: Args) -> Hooks:
    """Return the functions named by settings, without installed plugins. Raises PluginError for an unusable one."""
    manager = bare_manager()
    for row in hook_flags().values():
        given = getattr(args, row.setting, None) or []  # settings made by hand may lack it
        for spec in [given] if isinstance(given, str) else given:
            implement(manager, row, resolve(row.name, spec, origin=row.flags[0]).obj, row.flags[0])
    return Hooks(manager)
