"""Make the routing arrays of a rank's samples from `TrainBatch.routed_experts`; its trainer replays and completes them.

The learner calls this module once per rollout under `--use-routing-replay`. With `--use-rollout-routing-replay` the
arrays contain the rows that the engine reported. Otherwise they start empty, and the log-prob pass before the update
fills them (THUDM/slime's stages "record" and "replay"). If there is a log-prob pass, it also fills rows that the engine
did not report.

The arrays are filled in place. `TrainBatch.select` keeps the same arrays, so rows recorded in a pass over some samples
are replayed in the steps over all samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slime_core.errors import TrainError, rollout_name
from slime_core.models.family import RoutedLayers
from slime_core.sample import TrainBatch
from slime_core.sample.routed_experts import FREE, RoutedExperts


def routing_arrays(batch: TrainBatch, model: RoutedLayers) -> list[np.ndarray]:
    """Return [n] new int32 arrays [len(tokens) - 1, layers, top_k]; unknown entries are `FREE`.

    A layer's row that names an expert twice counts as unknown: engines leave zeros where they did not route.

    Raises:
        TrainError: The experts do not fit this model.
    """
    rows = batch.routed_experts or [None] * len(batch)
    return [_array(batch, i, value, model) for i, value in enumerate(rows)]


def _array(batch: TrainBatch, position: int, value: Any, model: RoutedLayers) -> np.ndarray:
    shape = (len(batch.tokens[position]) - 1, model.num_layers, model.experts_per_token)
    result = np.full(shape, FREE, dtype=np.int32)
    if value is None:
        return result
    given = np.asarray(RoutedExperts.of(value))
    layers = list(model.layers)
    if given.shape != shape or given[:, layers].max(initial=FREE) >= model.num_experts:
        raise TrainError(
            f"sample {batch.sample_indices[position]} of {rollout_name(batch.rollout_id)}: routed experts of shape"
            f" {given.shape}, up to number {given.max(initial=FREE)}; this model has {shape[1]} layers and"
            f" {model.experts_per_token} of {model.num_experts} experts per token, and the sample {shape[0] + 1}"
            " tokens. Do engine and trainer serve the same --hf-checkpoint?"
        )
    chosen = np.sort(given[:, layers], axis=-1)
    whole = (chosen[..., 0] >= 0) & (np.diff(chosen, axis=-1) > 0).all(axis=-1)
    result[:, layers] = np.where(whole[..., None], given[:, layers], FREE)
    return result
