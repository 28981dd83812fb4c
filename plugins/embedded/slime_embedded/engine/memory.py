"""Free and reallocate the embedded engine's weights and KV cache, for `release_memory` and `resume_memory`.

The core owns an `EngineMemory`. Released weights are lost: the trainer sends an update afterwards anyway, so no copy is
kept. Weights and their packed copies (`linear.py`) are freed in place, and the fused tensors remain the same objects;
the rows of the KV cache are dropped and recreated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from slime_core.errors import EngineError
from slime_embedded.engine.kv_cache import KVCache
from slime_embedded.engine.model_runner import ModelRunner
from slime_embedded.engine.weights import FusedWeights
from slime_embedded.models.storages import Storages

if TYPE_CHECKING:
    from slime_embedded.engine.adapters import AdapterRunner, AdapterWeights
    from slime_embedded.engine.cohorts import TransformersRunner, TransformersWeights
    from slime_embedded.engine.invariant_runner import InvariantRunner

TAGS = frozenset({"weights", "kv_cache"})


class EngineMemory:
    """The memory of one engine; the engine must be idle during every call."""

    def __init__(
        self,
        weights: FusedWeights | AdapterWeights | TransformersWeights,
        runner: ModelRunner | InvariantRunner | AdapterRunner | TransformersRunner,
        cache: KVCache,
    ) -> None:
        self._weights = weights
        self._cache = cache
        self._device = runner.device
        self._storages = Storages([*weights.tensors(), *runner.tensors()])
        self.released: frozenset[str] = frozenset()
        """Released tags of `TAGS`; the engine generates only if this is empty."""
        self._outdated = False
        """True if the weights are allocated again but have no values yet."""

    def release(self, tags: Sequence[str] | None) -> None:
        """Free the memory of the tags (None: all); released tags are skipped. Raises EngineError."""
        chosen = _checked(tags)
        if "kv_cache" in chosen:
            self._cache.clear()
        if "weights" in chosen:
            self._weights.drop_packed()
            self._storages.free()
        self.released |= chosen
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes on the device

    def resume(self, tags: Sequence[str] | None) -> None:
        """Allocate the memory again. Raises EngineError if generation would resume with lost weights."""
        chosen = _checked(tags) & self.released
        gone = self._outdated or "weights" in chosen
        if chosen and gone and not self.released - chosen:
            raise EngineError(
                "the weights were released and not updated since: take their memory again, update them, and then take"
                " the rest"
            )
        if "weights" in chosen:
            self._storages.allocate()
            self._outdated = True
        self.released -= chosen

    @property
    def has_weights(self) -> bool:
        """True if the weights are allocated."""
        return "weights" not in self.released

    def updated(self) -> None:
        """Record that the weights have values again."""
        self._outdated = False

    def nbytes(self) -> dict[str, int]:
        """Return tag -> allocated bytes."""
        weights = self._storages.nbytes + self._weights.packed_bytes
        return {"weights": weights, "kv_cache": self._cache.nbytes}


def _checked(tags: Sequence[str] | None) -> frozenset[str]:
    chosen = TAGS if tags is None else frozenset(tags)
    if unknown := sorted(chosen - TAGS):
        raise EngineError(f"memory tags {', '.join(map(repr, unknown))}; allowed: {', '.join(sorted(TAGS))}")
    return chosen
