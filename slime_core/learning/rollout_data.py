"""Convert a rank's batch and tensors to and from THUDM/slime's dictionary, for user functions of the training side.

The hook `slime_train_data` gets the whole local batch and may change it; a custom loss gets one micro-batch. In the
dictionary, `log_probs` are the old policy's, `rollout_log_probs` the engine's, `raw_reward` the rewards before shaping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from slime_core.errors import PluginError
from slime_core.estimator import as_column
from slime_core.learning.tensors import Column, TrainTensors
from slime_core.sample import TrainBatch

_RENAMED = {"old_log_probs": "log_probs"}
"""Key of each field of `TrainTensors` whose name differs."""


def rollout_data(batch: TrainBatch, tensors: TrainTensors) -> dict[str, Any]:
    """Return the batch's columns as lists, and the tensors' columns as lists of copied [response_length] tensors."""
    data = {**batch.to_rollout_data(), "tokens": [torch.tensor(row) for row in batch.tokens]}
    lengths = batch.response_lengths
    for _, key, column in columns(tensors):
        # Old log-probs that a step takes from itself are empty tensors here, so they are left out.
        if [len(part) for part in column] == lengths:
            data[key] = [part.clone() for part in column]
    return data


def taken_over(data: Mapping[str, object], tensors: TrainTensors, source: str) -> TrainTensors:
    """Return the tensors with the values that a function left in the dictionary.

    Denominators stay those of the original batch: a token masked here adds nothing, and the other tokens keep their
    weights.

    Args:
        data: Result of `rollout_data`, changed by a function. New columns are ignored.
        tensors: What `data` was made from.
        source: Name of the function in error messages.

    Raises:
        PluginError: A column is gone, or has other shapes than before, or a loss mask has entries besides 0 and 1.
    """
    changed: dict[str, Column] = {}
    for name, key, column in columns(tensors):
        if [len(part) for part in column] != [len(mask) for mask in tensors.loss_masks]:
            continue
        if key not in data:
            raise PluginError(f'{source}: rollout_data["{key}"] is gone; change the list in place or assign another')
        changed[name] = as_column(data[key], column, f'{source}: rollout_data["{key}"]')
    if any(bool(((mask != 0) & (mask != 1)).any()) for mask in changed["loss_masks"]):
        raise PluginError(f'{source}: rollout_data["loss_masks"] must hold 0 and 1 only')
    return replace(tensors, **changed)


def columns(tensors: TrainTensors) -> list[tuple[str, str, Column]]:
    """Return (field, key in the dictionary, column) of every column that the tensors have."""
    found = ((f.name, _RENAMED.get(f.name, f.name), getattr(tensors, f.name)) for f in fields(tensors))
    return [entry for entry in found if entry[2] is not None]
