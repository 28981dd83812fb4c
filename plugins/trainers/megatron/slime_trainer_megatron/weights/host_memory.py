"""Host memory of the ranks: read by rank 0 where it lies, and kept when it is freed.

`process_vm_readv` (man 2) copies once, where a socket takes several copies. It asks for what a debugger needs: the same
user and container, and a system that allows it. So it is tried first, on bytes that nobody else has, and whoever cannot
be read sends.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from slime_trainer_megatron.weights.parameters import gathered

_libc = ctypes.CDLL(None, use_errno=True)
_SET_PTRACER = 0x59616D61
"""`PR_SET_PTRACER` (linux/prctl.h): where Yama guards processes, this one may be read by another."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's `mallopt` (malloc.h)."""
_KEPT, _LARGEST_ON_HEAP = 512 << 20, 32 << 20
"""A bucket of an engine's; the most that glibc takes for the other."""


def keep_freed() -> None:
    """Let this process keep what it frees, up to a bucket, for the next tensors of up to 32 MiB.

    glibc gives it back at once, and fresh pages cost several times what is then copied into them.
    """
    if hasattr(_libc, "mallopt"):  # glibc's alone
        _libc.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        _libc.mallopt(_TRIM_THRESHOLD, _KEPT)


_readable: WeakKeyDictionary[Any, dict[int, int]] = WeakKeyDictionary()
"""By process group."""


class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read(process: int, address: int, into: torch.Tensor) -> None:
    """Fill `into`, contiguous and on the host, from another process. Raises OSError."""
    done, call = 0, _libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    while done < into.nbytes:  # a call moves 2 GiB at most
        left = into.nbytes - done
        here, there = _Range(into.data_ptr() + done, left), _Range(address + done, left)
        moved = call(process, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), 0)
        if moved <= 0:
            raise OSError(ctypes.get_errno(), f"process {process}: {os.strerror(ctypes.get_errno())}")
        done += moved


def readable_ranks() -> dict[int, int]:
    """Ranks that rank 0 can read -> their processes; the same on every rank. Collective, once for a process group."""
    if not dist.is_initialized():
        return {}
    if (known := _readable.get(dist.group.WORLD)) is not None:
        return known
    mark = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    told = gathered((os.getpid(), mark.data_ptr(), mark.tolist()))
    _libc.prctl(_SET_PTRACER, ctypes.c_ulong(told[0][0]))  # where there is no Yama nobody has to be told
    gathered(None)
    found = {}
    for rank, (process, address, expected) in enumerate(told):
        if rank and dist.get_rank() == 0:
            try:
                read(process, address, seen := torch.zeros_like(mark))
            except OSError:
                continue
            if seen.tolist() == expected:
                found[rank] = process
    return _readable.setdefault(dist.group.WORLD, gathered(found)[0])
