"""Host memory of the ranks: rank 0 reads it in place, and freed memory is kept for reuse.

`process_vm_readv` (man 2) copies once, while a socket takes several copies. It has a debugger's requirements: the same
user and container, and a system that allows it. So rank 0 tries it first, on random bytes, and a rank that cannot be
read sends its tensors instead.
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
"""`PR_SET_PTRACER` (linux/prctl.h): lets another process read this process under Yama."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt` (malloc.h)."""
_KEPT, _LARGEST_ON_HEAP = 512 << 20, 32 << 20
"""Value of each parameter: the size of an engine's bucket, and the largest value that glibc accepts."""


def keep_freed() -> None:
    """Make this process keep freed memory, up to a bucket, for the next tensors of up to 32 MiB.

    By default, glibc returns it at once, and fresh pages cost several times the copy into them.
    """
    if hasattr(_libc, "mallopt"):  # only glibc has it
        _libc.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        _libc.mallopt(_TRIM_THRESHOLD, _KEPT)


_readable: WeakKeyDictionary[Any, dict[int, int]] = WeakKeyDictionary()
"""Ranks that rank 0 can read and their processes, by process group."""


class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read(process: int, address: int, into: torch.Tensor) -> None:
    """Fill `into`, a contiguous tensor on the host, from the memory of another process. Raises OSError."""
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
    """Return the processes of the ranks that rank 0 can read, by rank; the same on every rank.

    Collective, once for a process group.
    """
    if not dist.is_initialized():
        return {}
    if (known := _readable.get(dist.group.WORLD)) is not None:
        return known
    mark = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    told = gathered((os.getpid(), mark.data_ptr(), mark.tolist()))
    _libc.prctl(_SET_PTRACER, ctypes.c_ulong(told[0][0]))  # without Yama the call has no effect
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
