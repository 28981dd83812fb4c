"""This process's place in Megatron's parallel layout: joins torch.distributed, makes Megatron's groups, seeds.

Made once by the trainer from torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and
shared by the actor's trainer and the critic's. One process needs none of these variables: it is a world of its own,
because Megatron has no way without process groups. `data_rank` counts data-parallel places only. All tensor, context
and pipeline peers of one place have the same `data_rank` and get the same batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from slime_embedded.trainer.parallel import join_peers, pick_device

from slime_core.errors import ConfigError
from slime_core.launch.ranks import env_int
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.installed import check_version

if TYPE_CHECKING:
    from slime_trainer_megatron.layout import Layout

ORDER = "tp-cp-ep-dp-pp"
"""Order of ranks: peers that communicate most get neighbouring ranks; Megatron's default."""


class ProcessGroups:
    """Megatron's groups in this process.

    The first object of a process creates the groups; another with the same layout and device shares them. The last
    `close()` destroys them.

    Args:
        layout: Layout in which the model is split.
        device: "auto", "cpu" or "cuda"; with cuda, process `LOCAL_RANK` of a machine takes that GPU.
        timeout_minutes: Deadline of every collective (`--distributed-timeout-minutes`).
        backend: Backend of torch.distributed; "auto" is nccl on GPUs and gloo on CPUs.
        seed: Seed of Megatron's random states (`--seed`).

    Raises:
        ConfigError: The environment, the device, the number of processes or the installed megatron-core does not
            allow it.
    """

    def __init__(
        self,
        layout: Layout,
        device: str = "auto",
        timeout_minutes: float = 10,
        backend: str = "auto",
        *,
        seed: int = 1234,
        order: str = ORDER,
    ) -> None:
        check_version()
        wanted = (layout, device, order)
        if _Joined.current is None:
            self.device = pick_device(device, env_int("LOCAL_RANK", 0))
            layout.data_size(env_int("WORLD_SIZE", 1))
            with on_device(self.device):
                _Joined.current = _Joined(layout, self.device, timeout_minutes, backend, seed, order)
            _Joined.current.wanted = wanted
        elif _Joined.current.wanted != wanted:
            raise ConfigError(
                f"this process is {_Joined.current.wanted} in its process groups, so another trainer in it cannot "
                f"have {wanted}: actor and critic share one layout and device"
            )
        self._joined = _Joined.current
        self._joined.users += 1
        self._open = True
        self.device = self._joined.device
        self.layout = layout
        from megatron.core import parallel_state as state

        self.rank: int = dist.get_rank()
        """Rank among all processes; `world_size` is their number."""
        self.world_size: int = dist.get_world_size()
        self.data_rank: int = state.get_data_parallel_rank()
        self.data_size: int = state.get_data_parallel_world_size()
        self.tensor_rank: int = state.get_tensor_model_parallel_rank()
        self.tensor_size: int = state.get_tensor_model_parallel_world_size()
        self.pipeline_rank: int = state.get_pipeline_model_parallel_rank()
        self.pipeline_size: int = state.get_pipeline_model_parallel_world_size()
        self.context_rank: int = state.get_context_parallel_rank()
        self.context_size: int = state.get_context_parallel_world_size()
        self.expert_rank: int = state.get_expert_model_parallel_rank()
        self.expert_size: int = state.get_expert_model_parallel_world_size()
        self.data_group: Any = state.get_data_parallel_group()
        self.tensor_group: Any = state.get_tensor_model_parallel_group()
        self.pipeline_group: Any = state.get_pipeline_model_parallel_group()
        self.context_group: Any = state.get_context_parallel_group()

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is the first of the pipeline and has the embedding (in its first chunk)."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is the last of the pipeline and has the output layer (in its last chunk)."""
        return self.pipeline_rank == self.pipeline_size - 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the data-parallel ranks of this place, as a new tensor on the device of `tensor`."""
        total = tensor.detach().to(self.device, copy=True).contiguous()
        dist.all_reduce(total, group=self.data_group)
        return total.to(tensor.device)

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return global rank 0's bytes on every rank; payloads of other ranks are ignored."""
        return self._broadcast(payload, 0, None)

    def broadcast_over_pipeline(self, payload: bytes | None) -> bytes:
        """Return the last stage's bytes on every stage of this rank's pipeline; payloads of others are ignored."""
        return self._broadcast(payload, self._last_stage(), self.pipeline_group)

    def tensors_over_pipeline(self, tensors: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Return the last stage's tensors by name on every stage, on the CPU; other stages pass None.

        It takes two broadcasts, of a description and of all the bytes, for any number of tensors.
        """
        if self.pipeline_size == 1:
            assert tensors is not None, "the only stage is the last one"
            return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        header, data = b"", b""
        if self.is_last_stage:
            assert tensors is not None, "the last stage broadcasts, so it must have tensors"
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            described = [(name, str(tensor.dtype)[6:], list(tensor.shape)) for name, tensor in plain.items()]
            header = json.dumps(described).encode()
            data = b"".join(_as_bytes(tensor) for tensor in plain.values())
        header, data = self.broadcast_over_pipeline(header), self.broadcast_over_pipeline(data)
        found, start = {}, 0
        for name, dtype, shape in json.loads(header):
            empty = torch.empty(shape, dtype=getattr(torch, dtype))
            end = start + empty.numel() * empty.element_size()
            if end > start:
                empty = torch.frombuffer(bytearray(data[start:end]), dtype=empty.dtype).reshape(shape)
            found[name], start = empty, end
        return found

    def barrier(self) -> None:
        """Wait until every rank has arrived."""
        dist.all_reduce(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Release the groups; the call of the last user destroys them. Safe to call twice."""
        if self._open:
            self._open = False
            self._joined.users -= 1
            if self._joined.users == 0:
                self._joined.leave()

    def _last_stage(self) -> int:
        return int(dist.get_global_rank(self.pipeline_group, self.pipeline_size - 1))

    def _broadcast(self, payload: bytes | None, source: int, group: Any) -> bytes:
        sends = self.rank == source
        assert payload is not None or not sends, "the rank that broadcasts must have bytes"
        payload = payload if sends and payload is not None else b""
        size = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        dist.broadcast(size, src=source, group=group)
        if int(size.item()) == 0:
            return b""
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        if sends:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        data = data.to(self.device)
        dist.broadcast(data, src=source, group=group)
        return data.cpu().numpy().tobytes()


class _Joined:
    """The process groups that this process has joined, and the number of `ProcessGroups` that use them."""

    current: ClassVar[_Joined | None] = None

    def __init__(
        self, layout: Layout, device: torch.device, timeout_minutes: float, backend: str, seed: int, order: str
    ) -> None:
        from megatron.core import parallel_state, tensor_parallel

        self.device, self.users = device, 0
        self.wanted: Any = None
        self.joined_world = not dist.is_initialized()
        if self.joined_world:
            join_peers(device, timeout_minutes, backend)
        try:
            parallel_state.initialize_model_parallel(
                layout.tensor,
                layout.pipeline,
                layout.virtual,
                context_parallel_size=layout.context,
                expert_model_parallel_size=layout.expert,
                expert_tensor_parallel_size=layout.expert_tensor,
                distributed_timeout_minutes=timeout_minutes,
                order=order,
            )
            # As Megatron's own training loop does: other weights on every stage, the same on every replica.
            seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
            torch.manual_seed(seed)
            # The tracker for inference has no generators of its own, which a CPU has not either.
            tensor_parallel.model_parallel_cuda_manual_seed(
                seed, inference_rng_tracker=device.type == "cpu", force_reset_rng=True
            )
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        from megatron.core import parallel_state

        _Joined.current = None
        parallel_state.destroy_model_parallel()
        for name, value in vars(parallel_state).items():
            if isinstance(value, dist.ProcessGroup):  # it forgets some
                setattr(parallel_state, name, None)
        if self.joined_world and dist.is_initialized():
            dist.destroy_process_group()


def joined_device() -> torch.device:
    """Return the device that this process trains on; a `ProcessGroups` must exist."""
    assert _Joined.current is not None, "ProcessGroups come first"
    return _Joined.current.device


def _as_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
