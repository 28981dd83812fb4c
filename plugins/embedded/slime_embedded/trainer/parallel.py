"""Data-parallel peers: process-group set-up from torchrun's environment, and the three collectives the trainer needs.

A process that torchrun did not start is rank 0 of 1. The Megatron trainer uses the set-up, too.

With one process there is no group and every collective is the identity. Nothing is pickled on the wire: tensors
go as they are, bytes as uint8 tensors. Every wait ends after `timeout_minutes` with torch's error.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from slime_core.errors import ConfigError
from slime_core.launch.ranks import env_int

_BUCKET_ELEMENTS = 16 * 1024 * 1024
"""Elements of one all-reduce of gradients: large enough to fill the wire, small enough to bound its buffers."""


class DataParallel:
    """This process's place among its peers.

    Args:
        device: "auto", "cpu" or "cuda"; with cuda, process `LOCAL_RANK` of a machine takes that GPU.
        timeout_minutes: Deadline of every collective.
        backend: torch.distributed's; "auto" is nccl on GPUs and gloo on CPUs.

    Raises:
        ConfigError: The environment or the device does not allow it.
    """

    def __init__(self, device: str = "auto", timeout_minutes: float = 10, backend: str = "auto") -> None:
        self.rank, self.world_size = env_int("RANK", 0), env_int("WORLD_SIZE", 1)
        self.device = pick_device(device, env_int("LOCAL_RANK", 0))
        self._owns_group = False
        if self.world_size > 1 and not dist.is_initialized():
            join_peers(self.device, timeout_minutes, backend)
            self._owns_group = True

    def sum_in_buckets_(self, flat: torch.Tensor) -> None:
        """Sum a flat tensor over all ranks, in place."""
        if self.world_size > 1:
            for bucket in torch.split(flat, _BUCKET_ELEMENTS):
                dist.all_reduce(bucket)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, as a new tensor where `tensor` lives."""
        if self.world_size == 1:
            return tensor.clone()
        total = tensor.detach().to(self.device, copy=True).contiguous()
        dist.all_reduce(total)
        return total.to(tensor.device)

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; the others pass None."""
        assert self.rank != 0 or payload is not None, "rank 0 broadcasts, so it must have bytes"
        if self.world_size == 1:
            assert payload is not None
            return payload
        size = torch.tensor([len(payload or b"")], dtype=torch.int64, device=self.device)
        dist.broadcast(size, src=0)
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.rank == 0 and payload:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        data = data.to(self.device)
        dist.broadcast(data, src=0)
        return data.cpu().numpy().tobytes()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Leave the process group if this object joined it; safe to call twice."""
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False


def pick_device(device: str, local_rank: int) -> torch.device:
    """Return the device of process `local_rank` on this machine for `--device` ("auto", "cpu" or "cuda").

    Raises:
        ConfigError: The device does not exist.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    if device == "cpu" or not available:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"LOCAL_RANK={local_rank} but torch sees {torch.cuda.device_count()} GPU(s): start fewer processes"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join_peers(device: torch.device, timeout_minutes: float, backend: str) -> None:
    """Join torch.distributed; a single process uses an in-memory store, without a port.

    Args:
        device: Device of the tensors in collectives.
        timeout_minutes: Deadline of every collective.
        backend: Backend of torch.distributed; "auto" is nccl on GPUs and gloo on CPUs.

    Raises:
        ConfigError: The environment is incomplete or the backend does not fit the device.
    """
    world_size = env_int("WORLD_SIZE", 1)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if name not in os.environ]
    if missing and world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size} but {', '.join(missing)} not set: start the processes with torchrun"
        )
    on_cpu = device.type == "cpu"
    if backend == "nccl" and on_cpu:
        raise ConfigError("--distributed-backend nccl: needs GPUs and this process trains on cpu; use gloo or auto")
    if backend == "auto":
        backend = "gloo" if on_cpu else "nccl"
    dist.init_process_group(
        backend,
        rank=env_int("RANK", 0) if world_size > 1 else 0,
        world_size=world_size,
        store=torch._C._distributed_c10d.HashStore() if world_size == 1 else None,
        timeout=timedelta(minutes=timeout_minutes),
    )
