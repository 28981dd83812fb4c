"""Memory of tensors that is given back and taken again under the same tensors, views included.

The embedded engine frees its weights so, the embedded trainer its gradients and moments (`--offload`). A tensor whose
memory is freed keeps its shape, and reading it is undefined, not an error. A tensor of which a NumPy array was made
(`numpy()` without a copy) keeps its memory for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

logger = logging.getLogger(__name__)


class Storages:
    """The storages behind some tensors, each once."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._storages = list(found.values())
        self._sizes: list[int] | None = None
        self._warned = False

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def freed(self) -> bool:
        """Between `free` and `allocate`."""
        return self._sizes is not None

    def free(self) -> None:
        """Give the memory back; nothing where it is. What cannot be is warned of once, and kept."""
        if self._sizes is not None:
            return
        self._sizes = [storage.nbytes() for storage in self._storages]
        for storage in self._storages:
            if storage.resizable():
                storage.resize_(0)
        if self.nbytes and not self._warned:
            self._warned = True
            logger.warning("%d bytes are not given back: something holds NumPy arrays of these tensors", self.nbytes)

    def allocate(self) -> None:
        """Take it again, with undefined contents; nothing where it is there."""
        if self._sizes is not None:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                if storage.resizable():
                    storage.resize_(size)
            self._sizes = None
