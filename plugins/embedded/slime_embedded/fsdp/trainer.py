"""`--train-backend fsdp`: the embedded trainer with parameters, gradients and moments sharded over its processes.

FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers one layer at a time for a pass, so a process holds its share of
the model and one whole layer. Everything else is the embedded trainer's: a step has the same loss and gradient norm as
in one process. Gradients are summed, not averaged, because the loss is normalised over the whole batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from slime_core import PluginOptions
from slime_core.errors import CheckpointError, ConfigError
from slime_core.ops import l2_norm
from slime_core.protocols import Args, TrainerTraits
from slime_embedded.fsdp.loading import empty_model, fill, parameters_on_meta
from slime_embedded.hf.config import model_config
from slime_embedded.hf.files import WeightFiles, in_files
from slime_embedded.hf.model import TransformersModel
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.lora import FOLDER, LoraSettings, merged, read_adapter
from slime_embedded.models.lora_linear import DOWN, UP, LoraLinear, adapter_weights, first_adapters, without_adapters
from slime_embedded.trainer import state
from slime_embedded.trainer.critic import Critic, critic_config, new_head
from slime_embedded.trainer.frozen import REFERENCE
from slime_embedded.trainer.lora import check_base, save_adapter
from slime_embedded.trainer.model_files import left_out
from slime_embedded.trainer.optimizer import AdamSettings, FlatAdamW, trained_parameters
from slime_embedded.trainer.parallel import DataParallel, join_peers
from slime_embedded.trainer.schedule import LearningRateSchedule
from slime_embedded.trainer.shared_settings import Role
from slime_embedded.trainer.trainer import EmbeddedTrainer

T = TypeVar("T")
_SHARDS = "shards"
"""Folder of the distributed checkpoint, beside the trainer's other files."""
_USES = (
    "actor_num_gpus_per_node actor_num_nodes kernels lora_alpha lora_dropout lora_rank lora_target_modules model_impl"
    " offload_train"
)


class FsdpTrainer(EmbeddedTrainer):
    """The fsdp `protocols.Trainer`; arguments and errors are those of `EmbeddedTrainer`."""

    traits = TrainerTraits(
        sampling_mask=True, routing_replay=True, collective_weights=True, uses=frozenset(_USES.split())
    )
    Options: ClassVar[type[PluginOptions]] = PluginOptions

    def __init__(self, args: Args, *, role: Role = "actor") -> None:
        if args.ref_update_interval:
            raise ConfigError(
                f"--ref-update-interval {args.ref_update_interval}: --train-backend fsdp keeps its reference; remove"
                " it, or use --train-backend embedded"
            )
        config = model_config(args.hf_checkpoint, args.model_impl)
        if config.images:
            raise ConfigError(
                f"--hf-checkpoint {args.hf_checkpoint}: a {config.model_type} model takes images, which"
                " --train-backend fsdp does not train on; use --train-backend embedded"
            )
        self._owns_group, self._seed = False, args.seed
        self._meshes: list[DeviceMesh] = []
        super().__init__(args, role=role)

    # -- loading -------------------------------------------------------------------------------------

    def _load(self, directory: str) -> Decoder:
        return empty_model(directory, self.settings)

    def _load_critic(self) -> Decoder:
        self.config = critic_config(self.config)
        with parameters_on_meta():
            return Critic(self.config, recompute=self.settings.recompute)

    def _new_optimizer(self, model: Decoder, adam: AdamSettings, schedule: LearningRateSchedule) -> FlatAdamW:
        directory, lora = self.settings.hf_checkpoint, self.settings.lora
        made = new_head(WeightFiles(directory), self.config) if isinstance(model, Critic) else {}
        if lora is not None:
            made = first_adapters(model, lora, self._seed)
        self._filled(model, directory, made)
        return ShardedAdamW(trained_parameters(model, self.settings), adam, schedule, self._parallel)

    def _load_frozen(self, role: str, directory: str, *, reference_moves: bool) -> Decoder:
        if self.settings.lora is not None and role == REFERENCE and directory == self.settings.hf_checkpoint:
            return Unadapted(self.model)
        return self._filled(self._load(directory), directory, {})

    def _filled(self, model: Decoder, directory: str, made: Mapping[str, torch.Tensor]) -> Decoder:
        """Shard an empty model, and read this process's shards."""
        self._shard(model)
        fill(model, directory, self.device, made)
        if isinstance(model, TransformersModel):
            register_fsdp_forward_method(model, "probe")
            model.probe()
        return model

    def _shard(self, model: Decoder) -> None:
        """Shard the parameters of each layer, and the rest, over the processes, in place."""
        if not dist.is_initialized():
            join_peers(self.device, self.settings.timeout_minutes, self.settings.distributed_backend)
            self._owns_group = True
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        self._meshes.append(mesh)
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList) and len(module) == self.config.num_layers:
                for layer in module:
                    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        register_fsdp_forward_method(model, "through")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    def _missing_passes(self, passes: int) -> int:
        counts = torch.zeros(self.world_size)
        counts[self.rank] = passes
        return int(self._parallel.all_reduce(counts).max()) - passes

    def _empty_passes(self, model: Decoder, passes: int) -> None:
        """Run a token without a loss as often as a rank with more micro-batches gathers weights."""
        token = torch.zeros(1, dtype=torch.long, device=self.device)

        def head(hidden: torch.Tensor) -> torch.Tensor:
            return (hidden.float() @ model.head_weight.float().T).sum() * 0

        for _ in range(passes):
            with self._compute():
                nothing = model.through(head, token, [1])
            if nothing.requires_grad:
                torch.autograd.backward(nothing)

    # -- weights and checkpoints ---------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield HF names and whole float32 tensors on rank 0, adapters merged, one at a time; a collective call."""
        return in_files(self._whole_weights(), self.model.places)

    def _whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole parameters on rank 0, adapters merged; a collective call."""
        adapted = {f"{name}.weight": m for name, m in self.model.named_modules() if isinstance(m, LoraLinear)}
        for name, parameter in self.model.named_parameters():
            if name.rpartition(".")[2] in (DOWN, UP):
                continue
            with torch.inference_mode(False):  # the engine reads in inference mode, in which shards are not gathered
                whole = _whole(parameter)
                if name in adapted:
                    layer = adapted[name]
                    whole = merged(whole, _whole(layer.lora_A), _whole(layer.lora_B), layer.scale)
            if self.rank == 0:
                yield name, whole

    def save(self, directory: Path) -> None:
        """Write the HF-layout model tensor by tensor, and every process's shards; returns when all have written."""
        directory, settings = Path(directory), self.settings
        weights = self.named_weights()
        if self.rank == 0:
            state.write_model(
                directory,
                chain(weights, left_out(self.model, settings)),
                self.config,
                settings.hf_checkpoint,
                settings.save_dtype,
                shard_bytes=settings.save_shard_bytes,
            )
        else:
            assert not list(weights)
        if settings.lora is not None:
            adapters = {name: _whole(shard) for name, shard in adapter_weights(self.model).items()}
            if self.rank == 0:
                save_adapter(directory / FOLDER, self.model, settings.lora, settings.hf_checkpoint, adapters)
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._shards(settings.save_optim), checkpoint_id=directory / state.FOLDER / _SHARDS)
        state.save_progress(directory, self.optimizer, settings, self.rank, self.world_size)
        self._parallel.barrier()

    def load(self, directory: Path) -> None:
        """Restore the state that any number of processes wrote; with `--finetune`, restore only the weights.

        Raises:
            CheckpointError: The checkpoint is incomplete, of another trainer, or does not fit this run.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        shards = Path(directory) / state.FOLDER / _SHARDS
        if not shards.is_dir():
            raise CheckpointError(
                f"{directory}: no shards of --train-backend fsdp (no {state.FOLDER}/{_SHARDS}); to start from its"
                " weights alone, name it as --hf-checkpoint instead of --load"
            )
        settings = self.settings
        if settings.lora is not None:
            self._check_adapters(directory, settings.lora)
        if not settings.finetune:
            state.load_progress(directory, self.optimizer, settings, self.rank, self.world_size)
        try:
            load(self._shards(settings.load_optim and not settings.finetune), checkpoint_id=shards)
        except (CheckpointException, RuntimeError, ValueError, OSError) as error:
            raise CheckpointError(f"{shards}: does not fit this run: {error}") from error
        assert isinstance(self.optimizer, ShardedAdamW)
        self.optimizer.read_weights()
        if settings.lora is not None:
            self._check_base(directory)

    def _check_adapters(self, directory: Path, lora: LoraSettings) -> None:
        """Raise CheckpointError unless the directory's adapters have this run's settings."""
        expected = {name: torch.empty(shard.shape) for name, shard in adapter_weights(self.model).items()}
        read_adapter(directory / FOLDER, lora, expected)

    def _check_base(self, directory: Path) -> None:
        """Raise CheckpointError on all ranks unless the merged model is the one that the directory stores."""
        weights, problem = self._whole_weights(), ""
        if self.rank == 0:
            try:
                check_base(directory, weights, self.model, self.settings.hf_checkpoint)
            except CheckpointError as error:
                problem = str(error)
        for _ in weights:
            pass  # the other ranks gather every tensor
        if message := self.broadcast(problem.encode() if self.rank == 0 else None).decode():
            raise CheckpointError(message)

    def _shards(self, with_moments: bool) -> dict[str, Any]:
        """Return the live shards by name, which a distributed checkpoint writes and reads in place."""
        assert isinstance(self.optimizer, ShardedAdamW)
        found: dict[str, Any] = {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if self.settings.lora is None or parameter.requires_grad
        }
        return {"model": found, **({"optimizer": self.optimizer.sharded_moments()} if with_moments else {})}

    def close(self) -> None:
        """Leave the process group, and drop the models, which hold it; safe to call twice.

        The group's threads end with its last reference. Gloo's may abort a process whose interpreter ends before them
        (pytorch#179291).
        """
        super().close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        for mesh in self._meshes:
            vars(mesh).get("_pg_registry", {}).clear()  # caches of DTensor keep meshes
        for name in ("model", "optimizer", "_policies", "_frozen"):
            vars(self).pop(name, None)
        gc.collect()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    sharded: Any = tensor.detach()
    whole: torch.Tensor = sharded.full_tensor()
    return whole


class Unadapted(Decoder):
    """A model with adapters as if it had none, in its own memory.

    Args:
        model: Model with LoRA layers.
    """

    def __init__(self, model: Decoder) -> None:
        nn.Module.__init__(self)
        self.config = model.config
        self._adapted = [model]  # not registered as a part: its adapters are trained

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight of the output layer, [vocab, hidden]."""
        return self._adapted[0].head_weight

    def through(self, head: Callable[[torch.Tensor], T], *inputs: Any, **keywords: Any) -> T:
        """Return `head` of the hidden states as `Decoder.through`."""
        (model,) = self._adapted
        with without_adapters(model):
            return model.through(head, *inputs, **keywords)

    def log_probs(self, hidden: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs and entropy as `Decoder.log_probs`; called by the head of `through`."""
        return self._adapted[0].log_probs(hidden, **how)


class ShardedAdamW(FlatAdamW):
    """`FlatAdamW` over the local shards of parameters; the flat values are copied to the shards after each step.

    FSDP keeps the storage of its shards, so the flat buffers are further copies: weights, gradients and two moments
    beside the shard and its gradient, 24 bytes for each local element during a step.
    """

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        settings: AdamSettings,
        schedule: LearningRateSchedule,
        parallel: DataParallel,
    ) -> None:
        self._sharded: dict[str, Any] = dict(parameters)
        local = [(name, nn.Parameter(p.to_local().detach().clone())) for name, p in self._sharded.items()]
        super().__init__(local, settings, schedule, parallel)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every trained parameter as a whole."""
        return {name: tuple(parameter.shape) for name, parameter in self._sharded.items()}

    def zero_grad(self) -> None:
        """Clear all gradients."""
        super().zero_grad()
        for parameter in self._sharded.values():
            parameter.grad = None

    def _norm(self) -> float:
        """Take the reduced gradients from the shards, and return the norm over all ranks."""
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                self._view(self.grads, name).copy_(parameter.grad.to_local())
                parameter.grad = None
        squared = l2_norm([self.grads]).double() ** 2
        return float(self._parallel.all_reduce(squared.reshape(1)).sqrt())

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Take a step as `FlatAdamW.step`."""
        result = super().step()
        for name, parameter in self._sharded.items():
            parameter.to_local().copy_(self._view(self.values, name))
        return result

    @torch.no_grad()
    def read_weights(self) -> None:
        """Take the values of the shards, after they were loaded."""
        for name, parameter in self._sharded.items():
            self._view(self.values, name).copy_(parameter.to_local())

    def moments(self) -> dict[str, torch.Tensor]:
        """Return nothing: the moments are in the distributed checkpoint."""
        return {}

    def sharded_moments(self) -> dict[str, torch.Tensor]:
        """Return both moments of every trained parameter as distributed tensors that share their memory."""
        return {key: self._like(key.partition(".")[2], local) for key, local in super().moments().items()}

    def _like(self, name: str, local: torch.Tensor) -> torch.Tensor:
        whole = self._sharded[name]
        return DTensor.from_local(
            local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
