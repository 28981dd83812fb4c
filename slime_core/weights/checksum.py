"""A tensor -> a short checksum, so two processes can compare weights without sending them.

The trainer's weight sync and every engine call this. The dtype is readable in the checksum: the side with the wider
dtype casts before it compares.
"""

from __future__ import annotations

import hashlib

import torch


def tensor_checksum(tensor: torch.Tensor) -> str:
    """`<dtype>:<32 hex digits>`, BLAKE2b (128 bits) over shape and raw bytes in row-major order."""
    tensor = tensor.detach().to("cpu").contiguous()
    digest = hashlib.blake2b(f"{tuple(tensor.shape)}".encode(), digest_size=16)
    # One element counts as contiguous with any stride, and only stride 1 can be viewed as bytes.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    digest.update(flat.view(torch.uint8).numpy().data)
    return f"{str(tensor.dtype).removeprefix('torch.')}:{digest.hexdigest()}"


def checksum_dtype(checksum: str) -> torch.dtype:
    """The dtype of the tensor that a checksum was made of."""
    dtype = getattr(torch, checksum.split(":", 1)[0])
    assert isinstance(dtype, torch.dtype)
    return dtype
