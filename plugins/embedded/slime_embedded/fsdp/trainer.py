"""`--train-backend fsdp`: the embedded trainer with parameters, gradients and moments sharded over its processes.

FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers one layer at a time for a pass, so a process holds its share of
the model and one whole layer. Everything else is the embedded trainer's: a step has the same loss and gradient norm as
in one process. Gradients are summed, not averaged, because the loss is normalised over the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from slime_core.errors import CheckpointError, ConfigError
from slime_core.ops import l2_norm
from slime_core.protocols import Args, TrainerTraits
from slime_embedded.hf.places import in_files
from slime_embedded.models.decoder import Decoder
from slime_embedded.trainer import state
from slime_embedded.trainer.model_files import left_out
from slime_embedded.trainer.optimizer import AdamSettings, FlatAdamW, trained_parameters
from slime_embedded.trainer.parallel import DataParallel
from slime_embedded.trainer.schedule import LearningRateSchedule
from slime_embedded.trainer.shared_settings import Role
from slime_embedded.trainer.torchrun import join_peers
from slime_embedded.trainer.trainer import EmbeddedTrainer

_SHARDS = "shards"
"""Folder of the distributed checkpoint, beside the trainer's other files."""
_USES = "actor_num_gpus_per_node actor_num_nodes kernels model_impl offload_train"


class FsdpTrainer(EmbeddedTrainer):
    """The fsdp `protocols.Trainer`; arguments and errors are those of `EmbeddedTrainer`."""

    traits = TrainerTraits(
        sampling_mask=True, routing_replay=True, collective_weights=True, uses=frozenset(_USES.split())
    )

    def __init__(self, args: Args, *, role: Role = "actor") -> None:
        if args.ref_update_interval:
            raise ConfigError(
                f"--ref-update-interval {args.ref_update_interval}: --train-backend fsdp keeps its reference; remove"
                " it, or use --train-backend embedded"
            )
        self._owns_group = False
        super().__init__(args, role=role)
        if self.config.images:
            raise ConfigError(
                f"--hf-checkpoint {args.hf_checkpoint}: a {self.config.model_type} model takes images, which"
                " --train-backend fsdp does not train on; use --train-backend embedded"
            )

    def _new_optimizer(self, model: Decoder, adam: AdamSettings, schedule: LearningRateSchedule) -> FlatAdamW:
        return ShardedAdamW(trained_parameters(self._sharded(model), self.settings), adam, schedule, self._parallel)

    def _load_frozen(self, role: str, directory: str, *, reference_moves: bool) -> Decoder:
        return self._sharded(super()._load_frozen(role, directory, reference_moves=reference_moves))

    def _sharded(self, model: Decoder) -> Decoder:
        """Shard the parameters of each layer, and the rest, over the processes, in place."""
        if not dist.is_initialized():
            join_peers(self.device, self.settings.timeout_minutes, self.settings.distributed_backend)
            self._owns_group = True
        mesh = init_device_mesh(self.device.type, (self.world_size,))
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
        return model

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
        """Yield HF names and whole float32 tensors on rank 0, one at a time; a collective call."""
        for name, parameter in self.model.named_parameters():
            with torch.inference_mode(False):  # the engine reads in inference mode, in which shards are not gathered
                whole = _whole(parameter.detach())
            if self.rank == 0:
                yield from in_files([(name, whole)], self.model.places)

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
        if not settings.finetune:
            state.load_progress(directory, self.optimizer, settings, self.rank, self.world_size)
        try:
            load(self._shards(settings.load_optim and not settings.finetune), checkpoint_id=shards)
        except (CheckpointException, RuntimeError, ValueError, OSError) as error:
            raise CheckpointError(f"{shards}: does not fit this run: {error}") from error
        assert isinstance(self.optimizer, ShardedAdamW)
        self.optimizer.read_weights()

    def _shards(self, with_moments: bool) -> dict[str, Any]:
        """Return the live shards by name, which a distributed checkpoint writes and reads in place."""
        assert isinstance(self.optimizer, ShardedAdamW)
        found: dict[str, Any] = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return {"model": found, **({"optimizer": self.optimizer.sharded_moments()} if with_moments else {})}

    def close(self) -> None:
        """Leave the process group; safe to call twice."""
        super().close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
