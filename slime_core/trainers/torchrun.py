"""What torchrun tells a process: its rank, its device, and how to find its peers.

Called by `DataParallel` of the embedded trainer and by `ProcessGroups` of the Megatron one. A process that was not
started by torchrun is rank 0 of 1.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from slime_core.errors import ConfigError


def env_int(name: str, default: int) -> int:
    """The environment variable as a number; `default` where it is not set.

    Raises:
        ConfigError: It is no number.
    """
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={text!r}: an integer is needed; torchrun sets it") from error


def pick_device(device: str, local_rank: int) -> torch.device:
    """`--device` ("auto", "cpu" or "cuda") for process `local_rank` of this machine.

    Raises:
        ConfigError: There is no such device.
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
    """Join torch.distributed; a single process alone in its own memory, so without a port.

    Args:
        device: Where the tensors of collectives are.
        timeout_minutes: Deadline of every collective.
        backend: torch.distributed's; "auto" is nccl on GPUs and gloo on CPUs.

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
