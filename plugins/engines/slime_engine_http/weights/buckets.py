"""Named tensors -> buckets: flat byte buffers with a list of their tensors.

`transports` and `distributed` send buckets. With `--use-fault-tolerance` the buckets are kept, for a server that has to
be updated later. SGLang slices a bucket by bytes and views each slice as its tensor's dtype. For broadcast buckets it
computes the slices itself, without padding. So tensors of wider dtypes come first, which aligns every slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slime_core.errors import WeightSyncError
from slime_engine_http.weights.shared_memory import SharedBuffer

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Slice:
    """The place of a tensor in a bucket, bytes [start, end)."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    end: int


@dataclass
class Bucket:
    """A bucket of tensors; `flat` is uint8 [bytes], and `shared` owns its memory if processes of this host share it."""

    slices: list[Slice]
    flat: torch.Tensor
    shared: SharedBuffer | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes of the weights."""
        return self.slices[-1].end

    def named(self) -> Iterator[Named]:
        """Yield the named tensors as views."""
        for s in self.slices:
            yield s.name, self.flat[s.start : s.end].view(s.dtype).reshape(s.shape)

    def free(self) -> None:
        """Free the memory; call it when no server reads the bucket any more."""
        self.flat = torch.empty(0, dtype=torch.uint8)
        if self.shared is not None:
            self.shared.free()


class Buffers:
    """Memory of buckets: one buffer that is reused for each bucket, or one buffer per kept bucket."""

    def __init__(self, *, shared: bool, keep: bool, device: torch.device | None = None) -> None:
        """Use host memory that other processes can map if `shared`, else memory on `device`."""
        self._shared, self._keep, self._device = shared, keep, device
        self._last: Bucket | None = None
        """The newest bucket; `_room` is its whole buffer, of which the bucket may use a part."""
        self._room: torch.Tensor | None = None

    def fill(self, named: Sequence[Named]) -> Bucket:
        """Copy these tensors into a bucket; invalidates the previous bucket, unless buckets are kept."""
        slices = _layout(named)
        bucket = self._place(slices)
        by_name = dict(named)
        for s in slices:
            source = by_name[s.name].detach().reshape(-1)
            bucket.flat[s.start : s.end].view(s.dtype).copy_(source)
        return bucket

    def free(self) -> None:
        """Free the reused buffer."""
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
    """Yield (tensors of at most `size` bytes, whether this is the last group); a larger tensor is a group of its own.

    Empty tensors are left out. Raises WeightSyncError if no tensor is left, or a name repeats.
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
