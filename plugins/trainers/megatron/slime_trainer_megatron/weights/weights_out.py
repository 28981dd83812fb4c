"""Export the parameters of all ranks as HF names and whole tensors on rank 0, a bucket at a time.

    every rank            offers the parts that it sends: names, parts, shapes, dtypes (one small collective)
                          -> the same list of buckets on every rank, in the order of `places`
    owners of a bucket    their parts of it    --read from their memory, or sent-->  rank 0
    rank 0                receives a bucket, merges one parameter after the other, yields HF tensors

`named_weights`, checkpoints in HF's layout and the tests of gradients call it. Of data- and context-parallel replicas
only the first sends. Parts go straight to rank 0, since no other rank needs them: an all-gather among tensor-parallel
ranks would first move every part to all of them. No rank ever holds more than a few buckets. Senders wait until rank 0
receives their bucket, so all ranks must iterate to the end. The deadline of this wait is the process group's.

Host memory of the ranks: rank 0 reads it in place, and freed memory is kept for reuse.

`process_vm_readv` (man 2) copies once, while a socket takes several copies. It has a debugger's requirements: the same
user and container, and a system that allows it. So rank 0 tries it first, on random bytes, and a rank that cannot be
read sends its tensors instead.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from slime_core.errors import ConfigError
from slime_core.models.hf_io import INDEX, WEIGHTS, copy_assets, write_config, write_weights
from slime_trainer_megatron.families.family import MegatronModel, Place, places
from slime_trainer_megatron.weights.parameters import NamedParameter, checked_parameters, gathered, part_of
from slime_trainer_megatron.weights.weights_in import SCALE, opened

What = Callable[[torch.Tensor], torch.Tensor | None]
Message = list[tuple[str, "_Piece"]]
"""(parameter name, part) of every part of a bucket that a rank sends."""


@dataclass(frozen=True)
class _Piece:
    """A rank's part of a parameter."""

    owner: int
    """Global rank that holds the part."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class _Entry:
    """A parameter of the whole model, with its parts in order."""

    place: Place
    pieces: tuple[_Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass
class _Bucket:
    """Parameters that are sent together."""

    entries: list[_Entry] = field(default_factory=list)
    nbytes: int = 0

    def messages(self) -> dict[int, Message]:
        """Return owner -> message; wider dtypes come first, which aligns every part."""
        found: dict[int, Message] = {}
        for entry in self.entries:
            for piece in entry.pieces:
                found.setdefault(piece.owner, []).append((entry.place.megatron, piece))
        return {owner: sorted(message, key=lambda part: -part[1].dtype.itemsize) for owner, message in found.items()}


def hf_weights(
    chunks: Sequence[Any],
    model: MegatronModel,
    *,
    bucket_bytes: int = 64 << 20,
    what: What = lambda parameter: parameter.data,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield HF names and whole tensors on global rank 0. Collective: every rank must iterate to the end.

    Args:
        chunks: The model of this rank, a chunk per virtual pipeline stage; wrapped or not.
        model: The family's weight map; for a critic, its `weight_map.critic_of`.
        bucket_bytes: Bytes of Megatron's parameters in transfer at a time; a larger parameter is sent alone.
        what: Parameter -> exported tensor of the same shape, such as gradients or a CPU copy. None leaves the parameter
            out and must be returned on every rank that has it. Called when the tensor is sent, and once before for
            shape and dtype. Also called with buffers that are weights, which have no gradient.

    Yields:
        HF name and whole tensor, in the order of `places`, in the dtype of `what`, on the parameters' device. Tensors
        may be views of the model or of a bucket: copy a tensor to keep it beyond the next step, and never write to it.
        A tied output layer is left out, as in the embedded trainer.

    Raises:
        ConfigError: The map does not fit the model; raised on every rank if it is raised on one.
    """
    here = dist.get_rank() if dist.is_initialized() else 0
    named = checked_parameters(chunks, model)
    own = {parameter.name: parameter.parameter for parameter in named if not parameter.copy}
    entries = _entries(named, model, what)
    near: dict[int, int] = {}
    if all(tensor.device.type == "cpu" for tensor in own.values()):
        keep_freed()
        near = readable_ranks()
    for bucket in _buckets(entries, bucket_bytes):
        messages = bucket.messages()
        if here == 0:
            yield from _merged(bucket, _receive(messages, own, what, near), model.architecture.vocab_size)
        elif here in messages:
            _send(messages[here], own, what, near=here in near)


def _entries(named: Sequence[NamedParameter], model: MegatronModel, what: What) -> list[_Entry]:
    """Return the exported parameters, the same list on every rank."""
    offers: list[tuple[str, int, int, tuple[int, ...], torch.dtype]] = []
    for parameter in named:
        part = part_of(parameter.row)
        if parameter.copy or not part.speaks:
            continue
        tensor = what(parameter.parameter)
        if tensor is not None:
            offers.append((parameter.name, part.rank, part.size, tuple(tensor.shape), tensor.dtype))
    pieces: dict[str, dict[int, _Piece]] = {}
    sizes: dict[str, int] = {}
    for owner, offered in enumerate(gathered(offers)):
        for name, rank, size, shape, dtype in offered:
            pieces.setdefault(name, {})[rank] = _Piece(owner, shape, dtype)
            sizes[name] = size
    entries = []
    for place in places(model):
        if found := pieces.get(place.megatron):
            if len(found) != sizes[place.megatron]:
                raise ConfigError(
                    f"{place.megatron}: parts {sorted(found)} of {sizes[place.megatron]} are there to be exported; "
                    "what is exported must be there on every rank or on none"
                )
            entries.append(_Entry(place, tuple(found[rank] for rank in sorted(found))))
    return entries


def _buckets(entries: Sequence[_Entry], bucket_bytes: int) -> Iterator[_Bucket]:
    bucket = _Bucket()
    for entry in entries:
        if bucket.entries and bucket.nbytes + entry.nbytes > bucket_bytes:
            yield bucket
            bucket = _Bucket()
        bucket.entries.append(entry)
        bucket.nbytes += entry.nbytes
    if bucket.entries:
        yield bucket


def _value(own: dict[str, torch.Tensor], name: str, what: What) -> torch.Tensor:
    tensor = what(own[name])
    assert tensor is not None, f"{name}: there when announced"
    return tensor.detach().to(own[name].device)


def _send(message: Message, own: dict[str, torch.Tensor], what: What, *, near: bool) -> None:
    parts = [_value(own, name, what).contiguous() for name, _ in message]
    if near:
        dist.send(torch.tensor([part.data_ptr() for part in parts]), dst=0)
        dist.recv(torch.empty(1), src=0)  # they have been read
    else:
        dist.send(torch.cat([part.view(-1).view(torch.uint8) for part in parts]), dst=0)


def _receive(
    messages: dict[int, Message], own: dict[str, torch.Tensor], what: What, near: dict[int, int]
) -> dict[tuple[str, int], torch.Tensor]:
    """Receive the parts as (name, owner) -> part; all owners send at the same time."""
    device = next(iter(own.values())).device
    parts = {(name, 0): _value(own, name, what) for name, _ in messages.pop(0, [])}
    arriving = []
    for owner, message in messages.items():
        if owner in near:
            flat = torch.empty(len(message), dtype=torch.long)
        else:
            flat = torch.empty(sum(piece.nbytes for _, piece in message), dtype=torch.uint8, device=device)
        arriving.append((owner, flat, dist.irecv(flat, src=owner)))
    for owner, flat, work in arriving:
        assert work is not None, "this rank is in the group of all ranks"
        work.wait()
        if owner in near:
            for (name, piece), address in zip(messages[owner], flat.tolist()):
                parts[name, owner] = part = torch.empty(piece.shape, dtype=piece.dtype)
                read(near[owner], address, part)
            dist.send(torch.empty(1), dst=owner)
        else:
            start = 0
            for name, piece in messages[owner]:
                parts[name, owner] = flat.narrow(0, start, piece.nbytes).view(piece.dtype).view(piece.shape)
                start += piece.nbytes
    return parts


def _merged(
    bucket: _Bucket, parts: dict[tuple[str, int], torch.Tensor], vocab_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in bucket.entries:
        row, name = entry.place.row, entry.place.megatron
        found = row.merge.to_hf([parts.pop((name, piece.owner)) for piece in entry.pieces])
        if row.vocabulary:
            found = [tensor[:vocab_size] for tensor in found]
        yield from zip(entry.place.hf, found)


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


def export_hf(
    weights: Iterator[tuple[str, torch.Tensor]],
    model: MegatronModel,
    directory: Path,
    *,
    hf: Mapping[str, Any],
    assets: str | Path,
    dtype: torch.dtype,
    cast: bool = True,
    shard_bytes: int,
) -> None:
    """Write the directory. Collective: every rank calls it, and only torch's rank 0 writes.

    Args:
        weights: From `hf_weights`: all of them on rank 0, none elsewhere.
        model: The family's map; of a critic, `weight_map.critic_of` it.
        directory: Of the export.
        hf: What config.json says, but for the dtype; `quantization_config` is left out, since the weights are not.
        assets: HF directory with the tokenizer, and with what the model carries along.
        dtype: Of the weights, and what config.json says of it.
        cast: False leaves weights of another dtype in theirs.
        shard_bytes: Largest file.
    """
    if dist.get_rank():
        for _ in weights:
            raise AssertionError("only rank 0 gets weights")
        return
    copy_assets(assets, directory)
    plain = {key: value for key, value in hf.items() if key not in ("torch_dtype", "quantization_config")}
    write_config(directory, {**plain, "dtype": str(dtype).removeprefix("torch.")})
    every = (pair for pairs in (weights, carried_weights(model, assets, dtype)) for pair in pairs)
    target = dtype if cast else None
    write_weights(directory, ((name, _copy(tensor, target)) for name, tensor in every), shard_bytes=shard_bytes)


def carried_weights(
    model: MegatronModel, directory: str | Path, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of an HF directory that the model has no place for, by `MegatronModel.carried`, as they are stored;
    block-quantised ones multiplied out, in `dtype`. Nothing for a directory without weights."""
    if not model.carried or not any((Path(directory) / name).is_file() for name in (WEIGHTS, INDEX)):
        return
    patterns = [re.compile(pattern) for pattern in model.carried]
    with opened(directory) as source:
        for name in source.files:
            if any(pattern.fullmatch(name) for pattern in patterns) and not name.endswith(SCALE):
                quantized = name + SCALE in source
                yield name, source.whole(name).to(dtype) if quantized else source.whole(name)


def _copy(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """On its own, not as a view: a view would keep a whole bucket until its shard is written."""
    return tensor.to(dtype, copy=True) if dtype is not None and tensor.is_floating_point() else tensor.clone()
