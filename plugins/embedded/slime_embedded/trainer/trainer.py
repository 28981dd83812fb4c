"""The default trainer: one HF-layout decoder in plain torch per process, data parallel, on CPU or CUDA.

The launcher builds it from `args`, once for the actor and once for a critic, and calls it through `protocols.Trainer`.
It computes log-probs or values of packed micro-batches, runs AdamW steps on the caller's loss, and writes checkpoints.
It contains no algorithm. Parameters are float32; only matrix products are bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field

from slime_core import PluginOptions, options
from slime_core.config import Settings
from slime_core.errors import ConfigError, TrainError, rollout_name
from slime_core.models.config import read_hf_config
from slime_core.models.family import DecoderShape, decoder_shape
from slime_core.models.hf_io import read_weights
from slime_core.protocols import Args, LossFn, MicroBatchOutput, StepResult, TrainerTraits
from slime_core.sample import TrainBatch
from slime_embedded import kernels
from slime_embedded.hf.config import model_config, transformers_config
from slime_embedded.hf.model import TransformersModel
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.logprobs import CHUNK_ELEMENTS, log_probs_from_logits
from slime_embedded.trainer import model_files, state
from slime_embedded.trainer.frozen import OLD_ACTOR, REFERENCE, FrozenModels
from slime_embedded.trainer.microbatch import MicroBatch, keep_routing, pack, routing_of, through
from slime_embedded.trainer.model_files import load_model, published_weights
from slime_embedded.trainer.optimizer import AdamSettings, FlatAdamW, trained_parameters
from slime_embedded.trainer.parallel import DataParallel
from slime_embedded.trainer.sample_rows import left_out
from slime_embedded.trainer.schedule import LearningRateSchedule
from slime_embedded.trainer.settings import TrainerSettings, check_fits, main_memory
from slime_embedded.trainer.shared_settings import Role
from slime_embedded.trainer.teachers import TEACHER, check_teachers

if TYPE_CHECKING:
    from slime_embedded.models.routing import Routing
    from slime_embedded.trainer.critic import Critic

_MOST_TOKENS = 32768
_MISMATCH = "routing_mismatch"
_USES = (
    "actor_num_gpus_per_node actor_num_nodes keep_old_actor kernels lora_alpha lora_dropout lora_rank"
    " lora_target_modules lora_unmerged model_impl offload_train"
)


class Policy(NamedTuple):
    """Weights that are trained together: the model with an adapter, or without LoRA all of it."""

    model: Decoder
    optimizer: FlatAdamW


class Options(PluginOptions):
    """`plugins.embedded.*`"""

    adapter_lr: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Learning rate of each of `--lora-adapters` that has one of its own instead of `--lr`."""


class EmbeddedTrainer:
    """The embedded `protocols.Trainer`; every data-parallel process constructs one per role and makes the same calls.

    Args:
        args: The run's settings; `settings.py`, `schedule.py` and `optimizer.py` read them.
        role: "actor", or "critic" for the value model.

    Raises:
        ConfigError: A setting is not supported by this trainer.
        CheckpointError: The weights do not fit their `config.json`.
    """

    traits = TrainerTraits(
        true_on_policy=True,
        sampling_mask=True,
        routing_replay=True,
        takes_images=True,
        takes_adapters=True,
        moves_teacher=True,
        uses=frozenset(_USES.split()),
    )
    Options: ClassVar[type[PluginOptions]] = Options

    def __init__(self, args: Args, *, role: Role = "actor") -> None:
        self.role = role
        kernels.use(args.kernels)
        self.settings = settings = TrainerSettings.from_args(args, role)
        # Settings are read before any process group is joined, so a mistake ends the run at once.
        schedule = LearningRateSchedule.from_args(args, critic=role == "critic")
        adam = AdamSettings.from_args(args)
        config = model_config(settings.hf_checkpoint, settings.model_impl)
        check_fits(args, settings, config, role)
        self._parallel = DataParallel(settings.device, settings.timeout_minutes, settings.distributed_backend)
        self.rank, self.world_size = self._parallel.rank, self._parallel.world_size
        self.device = self._parallel.device
        self.compute_dtype = settings.compute_dtype(self.device)
        self.config = config
        self.model: Decoder = self._load(settings.hf_checkpoint) if role == "actor" else self._load_critic()
        if settings.lora is not None:
            from slime_embedded.models.lora_linear import add_adapters

            add_adapters(self.model, settings.lora, args.seed, merge=settings.batch_invariant)
        self.optimizer = self._new_optimizer(self.model, adam, schedule)
        if isinstance(self.model, TransformersModel) and self.rank == 0:
            print(f"slime: {self.model.description}", file=sys.stderr, flush=True)
        self._policies = {"": Policy(self.model, self.optimizer)}
        """Adapters by name; "" is the shared one, and the only one without `--lora-adapters`."""
        for name in settings.adapters:
            from slime_embedded.trainer.lora import with_adapter

            model = with_adapter(self.model, settings, args.seed, name)
            self._policies[name] = Policy(model, self._new_optimizer(model, adam, _schedule_of(args, name, schedule)))
        moves = bool(args.ref_update_interval)
        self._frozen = FrozenModels(settings, partial(self._load_frozen, reference_moves=moves))
        if moves:
            self._frozen.check_reference_fits(self.model)
        self._last_rollout: int | None = None

    def _new_optimizer(self, model: Decoder, adam: AdamSettings, schedule: LearningRateSchedule) -> FlatAdamW:
        return FlatAdamW(trained_parameters(model, self.settings), adam, schedule, self._parallel)

    @property
    def _optimizers(self) -> dict[str, FlatAdamW]:
        return {name: policy.optimizer for name, policy in self._policies.items()}

    @staticmethod
    def check_settings(settings: Settings) -> list[str]:
        """Raise ConfigError for teachers that do not fit, and for what several adapters exclude.

        These are a frozen copy of the actor, the name `shared`, and learning rates of adapters that the run lacks.
        """
        check_teachers(settings)
        for name in options(settings.args, "embedded", Options).adapter_lr:
            if name not in settings.args.lora_adapters:
                known = " ".join(settings.args.lora_adapters) or "no names"
                raise ConfigError(f"plugins.embedded.adapter_lr: no adapter {name!r}; --lora-adapters has {known}")
        if not settings.args.lora_adapters:
            return []
        from slime_embedded.trainer.lora import SHARED

        if SHARED in settings.args.lora_adapters:
            raise ConfigError(f"{settings.cite('lora_adapters')}: samples that name no adapter have {SHARED!r}; rename")
        for name in ("ref_update_interval", "keep_old_actor"):
            if getattr(settings.args, name):
                raise ConfigError(
                    f"{settings.cite(name)} copies one model, and {settings.cite('lora_adapters')} trains several;"
                    " remove one of the two"
                )
        return []

    def settings_changed(self, args: Args) -> None:
        """Take the learning rates and the temperature of changed settings, from the next step on.

        Raises:
            ConfigError: The learning rates contradict each other.
        """
        schedule = LearningRateSchedule.from_args(args, critic=self.role == "critic")
        for name, optimizer in self._optimizers.items():
            optimizer.schedule = _schedule_of(args, name, schedule)
        self.settings = replace(self.settings, temperature=args.rollout_temperature)

    @classmethod
    def processes(cls, settings: Settings) -> int | None:
        """Return one data-parallel process per training GPU that the user requested.

        Returns None if `--actor-num-gpus-per-node` is not given: its default of 8 is THUDM/slime's, not a request.
        Raises ConfigError if more GPUs are requested than torch sees.
        """
        args = settings.args
        if not settings.is_given("actor_num_gpus_per_node"):
            return None
        there = torch.cuda.device_count() if args.device != "cpu" else 0
        if args.actor_num_gpus_per_node > there > 0:
            raise ConfigError(
                f"{settings.cite('actor_num_gpus_per_node')}: torch sees {there} GPU(s); type"
                f" --actor-num-gpus-per-node {there}, or --device cpu"
            )
        return int(args.actor_num_nodes * args.actor_num_gpus_per_node)

    @classmethod
    def tokens_that_fit(cls, args: Args, processes: int) -> int:
        """Return the tokens per pass whose activations fill half of the memory left by weights, gradients and moments.

        The result is at least 1,024. It is at most 4,096 on CPU, where more tokens bring no speed, and for several
        nodes, whose memory may differ.
        """
        assert args.max_tokens_per_gpu is not None, "derived where it was not given"
        gpu = args.device != "cpu" and torch.cuda.is_available()
        most = _MOST_TOKENS if gpu and args.actor_num_nodes == 1 else args.max_tokens_per_gpu
        if not (Path(args.hf_checkpoint) / "config.json").is_file():  # a recipe has yet to make it
            return most
        shape = decoder_shape(args.hf_checkpoint, cls)
        memory = torch.cuda.get_device_properties(0).total_memory if gpu else main_memory() // processes
        per_token = (shape.num_layers + 1) * sum(shape.activations) * (2 if gpu else 4)
        hf = read_hf_config(args.hf_checkpoint)
        size = 4 if "float32" in (hf.get("dtype"), hf.get("torch_dtype")) else 2
        elements = sum(p.stat().st_size for p in Path(args.hf_checkpoint).glob("*.safetensors")) / size
        states = elements * (16 if args.lora_rank is None else 4)
        return max(1024, min(most, int((memory - states) / 2 / per_token) // 1024 * 1024))

    @staticmethod
    def decoder_shape(directory: str | Path) -> DecoderShape:
        """Return the sizes that transformers reads, for a family without a plugin of kind "models"."""
        found = transformers_config(directory)
        return DecoderShape(**{field.name: getattr(found, field.name) for field in fields(DecoderShape)})

    def weight_probes(self) -> torch.Tensor:
        """Return about 65,536 trained weights, evenly spread; the odd stride visits every column of a matrix."""
        values = [optimizer.values for optimizer in self._optimizers.values()]
        flat = values[0] if len(values) == 1 else torch.cat(values)
        return flat[:: len(flat) >> 16 | 1]

    def _load_frozen(self, role: str, directory: str, *, reference_moves: bool) -> Decoder:
        # With adapters the actor's base weights never change, so a model with the same weights needs no memory.
        moves = role == OLD_ACTOR or (role == REFERENCE and reference_moves)
        if self.settings.lora is not None and directory == self.settings.hf_checkpoint and not moves:
            from slime_embedded.trainer.lora import base_of

            return base_of(self.model)
        return self._load(directory)

    def _load(self, directory: str) -> Decoder:
        return load_model(directory, self.settings, self.device)

    def _load_critic(self) -> Decoder:
        from slime_embedded.trainer.critic import Critic, critic_config, with_head

        self.config = critic_config(self.config)
        directory = self.settings.hf_checkpoint
        weights = (pair for pair in read_weights(directory, self.device) if pair[0] != "lm_head.weight")
        return Critic.from_weights(
            self.config,
            with_head(weights, self.config, self.device),
            self.device,
            recompute=self.settings.recompute,
            origin=directory,
        )

    # -- forward -------------------------------------------------------------------------------------

    def log_probs(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        *,
        role: Literal["actor", "ref", "teacher", "old_actor"] = "actor",
    ) -> list[torch.Tensor]:
        """Return [response_length] float32 log-probs per sample of the batch, without gradient.

        Raises:
            TrainError: The role has no model here, or the micro-batches leave a sample out.
        """
        run = partial(self._recorded, role, batch, False)
        return self._over(role, batch, micro_batches, run)[0]

    def log_probs_and_entropy(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the actor's `log_probs`, and entropies in nats of the same shapes. Raises TrainError, too."""
        run = partial(self._recorded, "actor", batch, True)
        log_probs, entropies = self._over("actor", batch, micro_batches, run)
        return log_probs, entropies

    def over_logits(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        read: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
        *,
        role: str = "actor",
    ) -> list[list[torch.Tensor]]:
        """Return the results of `read` per sample; see `protocols.Trainer`. Raises as `log_probs`."""
        settings = self.settings
        size = settings.log_probs_chunk_size

        def run(model: Decoder, micro: MicroBatch) -> tuple[torch.Tensor, ...]:
            rows = size if size > 0 else max(1, CHUNK_ELEMENTS[self.device.type] // model.config.vocab_size)

            def head(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
                parts = zip(torch.split(hidden, rows), torch.split(micro.targets, rows))
                logits = ((model.logits(h.to(self.compute_dtype)).float(), t) for h, t in parts)
                found = [read(scores / settings.temperature, t) for scores, t in logits]
                return tuple(torch.cat(column) for column in zip(*found, strict=True))

            with self._compute():
                return through(model, micro, head)

        return self._over(role, batch, micro_batches, run)

    def values(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return [response_length] float32 values per sample of the batch, without gradient.

        Raises:
            TrainError: This trainer has no critic, or the micro-batches leave a sample out.
        """
        critic = self._critic()
        return self._over("critic", batch, micro_batches, lambda _, micro: (self._values(critic, micro),))[0]

    def _over(
        self,
        role: str,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        run: Callable[[Decoder, MicroBatch], tuple[torch.Tensor | None, ...]],
    ) -> list[list[torch.Tensor]]:
        """Return the results of `run` for all samples: one column per tensor. A teacher's vocabulary may be smaller."""
        found: dict[int, tuple[torch.Tensor, ...]] = {}
        own = role == self.role
        for model, batches in self._models(role, batch, micro_batches):
            missing = self._missing_passes(len(batches))
            with torch.no_grad():
                for positions in batches:
                    micro = pack(batch, positions, model.config.vocab_size, self.device)
                    results = run(self._actor_of(batch, positions) if own else model, micro)
                    parts = [torch.split(x, micro.response_lengths) for x in results if x is not None]
                    found.update(zip(micro.positions, zip(*parts, strict=True), strict=True))
                self._empty_passes(model, missing)
        left_out(batch, micro_batches)
        return [list(column) for column in zip(*(found[i] for i in range(len(batch))), strict=True)] or [[], []]

    def _models(
        self, role: str, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Decoder, Sequence[Sequence[int]]]]:
        """Yield the models of a role with the micro-batches that go through each; several teachers share one role."""
        if role == self.role:
            yield self.model, self._of_one_adapter(batch, micro_batches)
        elif role == TEACHER and TEACHER in self._frozen:
            for each, parts in self.settings.teachers.by_role(batch, micro_batches).items():
                yield self._frozen[each], parts
        else:
            yield self._frozen[role], micro_batches

    def _of_one_adapter(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Split micro-batches so that all samples of a pass have the same adapter."""
        if len(self._policies) == 1:
            return micro_batches
        from slime_embedded.trainer.lora import by_adapter

        return [part for positions in micro_batches for part in by_adapter(batch, positions, self._policies).values()]

    def _actor_of(self, batch: TrainBatch, positions: Sequence[int]) -> Decoder:
        """Return the model of a pass of `_of_one_adapter`."""
        if len(self._policies) == 1:
            return self.model
        from slime_embedded.trainer.lora import by_adapter

        (name,) = by_adapter(batch, positions, self._policies)
        return self._policies[name].model

    def _missing_passes(self, passes: int) -> int:
        """Return how many passes fewer this rank makes than another; 0 if ranks need not make the same number."""
        return 0

    def _empty_passes(self, model: Decoder, passes: int) -> None:
        """Take part in the passes of ranks with more micro-batches."""

    def _recorded(
        self, role: str, batch: TrainBatch, with_entropy: bool, model: Decoder, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `_log_probs`; for the actor and the old actor, replay the batch's routing and record missing routing."""
        replays = role in ("actor", OLD_ACTOR)
        routing = routing_of(batch, micro, self.config, self.device) if replays else None
        found = self._log_probs(model, micro, with_entropy, routing)
        if routing is not None:
            keep_routing(batch, micro, self.config, routing)
        return found

    def _log_probs(
        self, model: Decoder, micro: MicroBatch, with_entropy: bool, routing: Routing | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [R] log-probs of the response tokens in the temperature-scaled distribution, and its entropy."""
        if self.settings.batch_invariant:
            from slime_embedded.models.batch_invariant import BatchInvariantForward

            forward, how = BatchInvariantForward(model), self._of_targets(micro, with_entropy)
            hidden = forward.packed(micro.token_ids, micro.lengths, routing)
            return forward.token_log_probs(hidden[torch.from_numpy(micro.rows).to(self.device)], **how)
        how = {**self._of_targets(micro, with_entropy), "kernels": kernels.training}
        with self._compute():
            return through(model, micro, lambda h: model.log_probs(h.to(self.compute_dtype), **how), routing=routing)

    def _of_targets(self, micro: MicroBatch, with_entropy: bool) -> dict[str, Any]:
        """Return target ids, temperature, chunk size and sampling mask, by parameter name."""
        return {
            "targets": micro.targets,
            "temperature": self.settings.temperature,
            "chunk_size": self.settings.log_probs_chunk_size,
            "with_entropy": with_entropy,
            "mask": micro.mask,
        }

    def _values(self, critic: Critic, micro: MicroBatch) -> torch.Tensor:
        """Return [R] values of the states before the response tokens."""
        with self._compute():
            return through(critic, micro, critic.values)

    def _compute(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32)

    # -- step ----------------------------------------------------------------------------------------

    def train_step(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        *,
        with_entropy: bool = False,
        with_logits: bool = False,
    ) -> StepResult:
        """Run one optimizer step over all micro-batches of all ranks.

        Args:
            batch: This rank's samples.
            micro_batches: Positions in the batch; samples at other positions take no part in the step. Ranks may have
                different numbers of micro-batches, but every rank needs at least one.
            loss_fn: Called once per micro-batch; must return the same metric names on every rank.
            with_entropy: Fill `MicroBatchOutput.entropy`, differentiable.
            with_logits: Fill `MicroBatchOutput.logits`, differentiable; takes memory for tokens x vocabulary.

        Returns:
            As metrics those of `loss_fn` summed over micro-batches and ranks, `grad_norm` before clipping, `lr`,
            `skipped_steps` (1 when the gradients were not finite and nothing was changed), and with routing replay
            `routing_mismatch`, the share of replayed (token, layer) pairs whose router would choose other experts;
            with several adapters those of `step_adapters`; and the log-probs before the step.

        Raises:
            TrainError: No micro-batch, or gradients not finite in several steps in a row.
        """
        if not micro_batches:
            raise TrainError(
                f"{rollout_name(batch.rollout_id)}: an optimizer step without micro-batches on rank {self.rank}"
            )
        for optimizer in self._optimizers.values():
            if self.settings.reset_optimizer_states and batch.rollout_id != self._last_rollout:
                optimizer.reset_moments()
            optimizer.zero_grad()
        self._last_rollout = batch.rollout_id
        micro_batches = self._of_one_adapter(batch, micro_batches)
        totals: dict[str, torch.Tensor] = {}
        log_probs: dict[int, torch.Tensor] = {}
        grads: dict[int, torch.Tensor] = {}
        mismatches = torch.zeros(2, dtype=torch.float64, device=self.device)
        missing = self._missing_passes(len(micro_batches))
        for positions in micro_batches:
            micro = pack(batch, positions, self.config.vocab_size, self.device, every_token=with_logits)
            routing = routing_of(batch, micro, self.config, self.device) if self.role == "actor" else None
            output = self._output(self._actor_of(batch, positions), micro, with_entropy, with_logits, routing)
            if self.role == "actor":
                parts = torch.split(output.log_probs.detach(), micro.response_lengths)
                log_probs.update(zip(micro.positions, parts, strict=True))
            loss, metrics = loss_fn(output)
            if loss.requires_grad and output.log_probs.requires_grad:
                output.log_probs.retain_grad()
            if loss.requires_grad:
                torch.autograd.backward(loss)
            if output.log_probs.retains_grad and output.log_probs.grad is not None:
                parts = torch.split(output.log_probs.grad, micro.response_lengths)
                grads.update(zip(micro.positions, parts, strict=True))
            for name, value in metrics.items():
                detached = value.detach().to(self.device, torch.float64)
                totals[name] = totals[name] + detached if name in totals else detached
            if routing is not None:
                mismatches = mismatches + routing.mismatches().to(self.device)
        self._empty_passes(self.model, missing)
        found = self._summed(totals)
        if batch.routed_experts is not None and self.role == "actor":
            different, replayed = self._parallel.all_reduce(mismatches).tolist()
            found[_MISMATCH] = different / max(replayed, 1.0)
        return StepResult({**found, **self._step(batch, micro_batches)}, log_probs, grads)

    def _step(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> dict[str, float]:
        """Take the optimizer step, with several adapters of those of which a token is trained on some rank."""
        if len(self._policies) == 1:
            return self.optimizer.step()
        from slime_embedded.trainer.lora import by_adapter, step_adapters

        trained = dict.fromkeys(self._policies, 0.0)
        for positions in micro_batches:
            for name, part in by_adapter(batch, positions, self._policies).items():
                trained[name] += sum(sum(batch.loss_masks[position]) for position in part)
        counts = self._parallel.all_reduce(torch.tensor(list(trained.values()), dtype=torch.float64))
        return step_adapters(self._optimizers, counts.tolist())

    def _output(
        self, model: Decoder, micro: MicroBatch, with_entropy: bool, with_logits: bool, routing: Routing | None
    ) -> MicroBatchOutput:
        if self.role == "critic":
            values = self._values(self._critic(), micro)
            return MicroBatchOutput(micro.positions, values.new_empty(0), values=values)
        if with_logits:
            return self._with_logits(model, micro, with_entropy, routing)
        log_probs, entropy = self._log_probs(model, micro, with_entropy, routing)
        return MicroBatchOutput(micro.positions, log_probs, entropy)

    def _with_logits(
        self, model: Decoder, micro: MicroBatch, with_entropy: bool, routing: Routing | None
    ) -> MicroBatchOutput:
        with self._compute():
            logits = through(
                model, micro, lambda h: model.logits(h.to(self.compute_dtype)).float(), every_row=True,
                routing=routing,
            )  # fmt: skip
        chosen = logits[torch.from_numpy(micro.rows).to(self.device)]
        how = self._of_targets(micro, with_entropy)
        log_probs, entropy = log_probs_from_logits(chosen, kernels=kernels.training, **how)
        return MicroBatchOutput(micro.positions, log_probs, entropy, logits=logits[None])

    def _summed(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        if not totals:
            return {}
        names = sorted(totals)
        values = self._parallel.all_reduce(torch.stack([totals[name].reshape(()) for name in names]))
        return dict(zip(names, values.tolist(), strict=True))

    # -- peers ---------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over data-parallel ranks, as a new tensor."""
        return self._parallel.all_reduce(tensor)

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank; the other ranks pass None."""
        return self._parallel.broadcast(payload)

    # -- weights -------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield HF names and float32 tensors of the model, with adapters merged; skip a tied output layer, like HF.

        Without adapters the tensors are the live parameters: copy them if they must outlast the next step. The merged
        weights of each of `--lora-adapters` follow, as `adapters.NAME.<HF name>`. With `--lora-unmerged` yield the
        adapters alone.
        """
        unmerged = self.settings.lora_unmerged
        if unmerged or self.settings.adapters:
            from slime_embedded.models.lora_linear import ADAPTERS, adapted_weights, served_adapters

        yield from served_adapters(self.model) if unmerged else published_weights(self.model, self.settings)
        for name in self.settings.adapters:
            model = self._policies[name].model
            merged = ((weight, merge()) for weight, merge in adapted_weights(model))
            for weight, tensor in served_adapters(model) if unmerged else merged:
                yield f"{ADAPTERS}.{name}.{weight}", tensor

    def update_reference(self) -> None:
        """Copy the actor's weights into the reference. Raises TrainError when the run has no reference."""
        self._frozen.copy(REFERENCE, self.model)

    def update_teacher(self, rate: float) -> None:
        """Move the teacher by a share of its way to the actor. Raises TrainError if the run has no fitting teacher."""
        self._frozen.follow(self.model, rate)

    def update_old_actor(self) -> None:
        """Copy the actor's weights into the old actor. Raises TrainError without `--keep-old-actor`."""
        self._frozen.copy(OLD_ACTOR, self.model)

    def _critic(self) -> Critic:
        from slime_embedded.trainer.critic import Critic

        if not isinstance(self.model, Critic):
            raise TrainError("this trainer has no 'critic' model; it is built with role='critic'")
        return self.model

    # -- checkpoints ---------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the HF-layout model and, in `directory/trainer`, all data that `load` needs.

        Returns when every rank has written. All ranks must see the directory.
        """
        directory = Path(directory)
        if self.rank == 0:
            model_files.save(directory, self.model, self.config, self.settings)
            self._frozen.save(directory, self.model)
        state.save_progress(directory, self.optimizer, self.settings, self.rank, self.world_size)
        for name in self.settings.adapters:
            self._save_adapter(name, directory)
        self._parallel.barrier()

    def _save_adapter(self, name: str, directory: Path) -> None:
        from slime_embedded.models.lora_linear import ADAPTERS
        from slime_embedded.trainer.lora import save_adapter

        folder, (model, optimizer), lora = directory / ADAPTERS / name, self._policies[name], self.settings.lora
        assert lora is not None
        if self.rank == 0:
            save_adapter(folder, model, lora, self.settings.hf_checkpoint)
        state.save_progress(folder, optimizer, self.settings, self.rank, self.world_size)

    def load(self, directory: Path) -> None:
        """Restore the state that `save` wrote, bit for bit; with `--finetune`, restore only the weights.

        Raises:
            CheckpointError: The checkpoint is incomplete or does not fit this run.
        """
        from slime_embedded.trainer.lora import check_adapters

        directory = Path(directory)
        check_adapters(directory, self.settings.adapters)
        for name in self.settings.adapters:
            self._load_adapter(name, directory)
        if not self.settings.finetune:
            state.load_progress(directory, self.optimizer, self.settings, self.rank, self.world_size)
        model_files.load(directory, self.model, self.settings)
        self._frozen.load(directory, self.model)

    def _load_adapter(self, name: str, directory: Path) -> None:
        from slime_embedded.models.lora import read_adapter
        from slime_embedded.models.lora_linear import ADAPTERS, adapter_weights

        folder, (model, optimizer), lora = directory / ADAPTERS / name, self._policies[name], self.settings.lora
        assert lora is not None
        if not self.settings.finetune:
            state.load_progress(folder, optimizer, self.settings, self.rank, self.world_size)
        read_adapter(folder, lora, adapter_weights(model))

    def offload(self) -> None:
        """Free the gradients and, on a GPU, move the moments to the host; return when every rank has finished.

        Parameters and frozen models stay on the device, since weight pushes and checkpoints read them there.
        """
        for optimizer in self._optimizers.values():
            optimizer.offload()
        self._parallel.barrier()

    def onload(self) -> None:
        """Move the moments back to the device."""
        for optimizer in self._optimizers.values():
            optimizer.onload()

    def close(self) -> None:
        """Leave the process group; safe to call twice. The trainer takes no steps afterwards."""
        self._parallel.close()


def _schedule_of(args: Args, adapter: str, schedule: LearningRateSchedule) -> LearningRateSchedule:
    """Return the schedule with the adapter's own learning rate, if it has one. Raises ConfigError as `from_args`."""
    lr = options(args, "embedded", Options).adapter_lr.get(adapter)
    return schedule if lr is None else LearningRateSchedule.from_args(args.model_copy(update={"lr": lr}))
