"""Data-parallel peers: process-group set-up from torchrun's environment, and the three collectives the trainer needs.

With one process there is no group and every collective is the identity. Nothing is pickled on the wire: tensors
go as they are, bytes as uint8 tensors. Every wait ends after `timeout_minutes` with torch's error.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slime_core.launch.ranks import env_int
from slime_embedded.trainer.torchrun import join_peers, pick_device

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
