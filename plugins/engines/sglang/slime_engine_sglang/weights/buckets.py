"""Named tensors -> buckets: one flat run of bytes and the list of what lies where.

`transports` and `distributed` send buckets; under `--use-fault-tolerance` they are kept, for a server that
has to be brought up to date later. SGLang slices a bucket by bytes and views each slice as its tensor's dtype, and for
broadcast buckets it computes the slices itself, without padding: so tensors of wider dtypes come first, which aligns
every slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slime_core.errors import WeightSyncError
from slime_engine_sglang.weights.shared_memory import SharedBuffer

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Slice:
    """One tensor's place in a bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    end: int


@dataclass
class Bucket:
    """`flat` is uint8 [bytes]; `shared` owns its memory when that can be shared with other processes of this host."""

    slices: list[Slice]
    flat: torch.Tensor
    shared: SharedBuffer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return self.slices[-1].end

    def named(self) -> Iterator[Named]:
        """The tensors again, as views."""
        for s in self.slices:
            yield s.name, self.flat[s.start : s.end].view(s.dtype).reshape(s.shape)

    def free(self) -> None:
        """Give the memory back, when no server reads it any more."""
        self.flat = torch.empty(0, dtype=torch.uint8)
        if self.shared is not None:
            self.shared.free()


class Buffers:
    """Where the bytes of buckets lie: one buffer, used again for each bucket, or one per bucket that is kept."""

    def __init__(self, *, shared: bool, keep: bool, device: torch.device | None = None) -> None:
        """`shared`: host memory that other processes can map; `device` is for memory that is not."""
        self._shared, self._keep, self._device = shared, keep, device
        self._last: Bucket | None = None
        """The bucket that was handed out last; `_room` is all of the memory that it may use a part of."""
        self._room: torch.Tensor | None = None

    def fill(self, named: Sequence[Named]) -> Bucket:
        """The bucket of these tensors; invalidates the one before, unless buckets are kept."""
        slices = _layout(named)
        bucket = self._place(slices)
        by_name = dict(named)
        for s in slices:
            source = by_name[s.name].detach().reshape(-1)
            bucket.flat[s.start : s.end].view(s.dtype).copy_(source)
        return bucket

    def free(self) -> None:
        """Give back the buffer that was used again and again."""
        last, self._last, self._room = self._last, None, None
        if last is not None:
            last.free()

    def _place(self, slices: list[Slice]) -> Bucket:
        size, last, room = slices[-1].end, self._last, self._room
        if last is not None and room is not None and room.numel() >= size:
            self._last = Bucket(slices, room[:size], last.shared)
            last.flat = room[:0]
            return self._last
        self.free()
        if self._shared:
            buffer = SharedBuffer(size)
            bucket = Bucket(slices, buffer.tensor, buffer)
        else:
            bucket = Bucket(slices, torch.empty(size, dtype=torch.uint8, device=self._device))
        if not self._keep:
            self._last, self._room = bucket, bucket.flat
        return bucket


def group_tensors(weights: Iterable[Named], size: int) -> Iterator[tuple[list[Named], bool]]:
    """Runs of tensors of at most `size` bytes, a larger tensor alone, each with whether it is the last.

    Empty tensors are left out: there is nothing to send. Raises WeightSyncError when nothing is left, or a name
    comes again.
    """
    run: list[Named] = []
    held = 0
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise WeightSyncError(f"the trainer gives tensor {name!r} twice")
        seen.add(name)
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            continue
        if run and held + nbytes > size:
            yield run, False
            run, held = [], 0
        run.append((name, tensor))
        held += nbytes
    if not run:
        raise WeightSyncError("the trainer gives no weights to send")
    yield run, True


def _layout(named: Sequence[Named]) -> list[Slice]:
    slices, at = [], 0
    for name, tensor in sorted(named, key=lambda entry: -entry[1].element_size()):
        end = at + tensor.numel() * tensor.element_size()
        slices.append(Slice(name, tensor.shape, tensor.dtype, at, end))
        at = end
    return slices
