"""Rank, device and process group of a process, from torchrun's environment variables.

Called by `DataParallel` of the embedded trainer and by `ProcessGroups` of the Megatron one. A process that was not
started by torchrun is rank 0 of 1.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from slime_core.errors import ConfigError
from slime_core.launch.ranks import env_int


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
