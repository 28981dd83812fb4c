"""Convert a rank's batch and tensors to and from THUDM/slime's dictionary, for user functions of the training side.

Two functions read it: the hook `slime_train_data` gets the whole local batch and may change it, and a custom loss gets
one micro-batch. In the dictionary, `log_probs` are the old policy's, `rollout_log_probs` the engine's, and `raw_reward`
the rewards before shaping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from slime_core.errors import PluginError
from slime_core.learning.tensors import Column, TrainTensors
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch

_RENAMED = {"old_log_probs": "log_probs"}
"""Key of each field of `TrainTensors` whose name differs."""


def rollout_data(batch: TrainBatch, tensors: TrainTensors) -> dict[str, Any]:
    """Return the batch's columns as lists, and the tensors' columns as lists of copied [response_length] tensors."""
    data = {**batch.to_rollout_data(), "tokens": [torch.tensor(row) for row in batch.tokens]}
    lengths = batch.response_lengths
    for name, column in _columns(tensors):
        # Old log-probs that a step takes from itself are empty tensors here, so they are left out.
        if [len(part) for part in column] == lengths:
            data[_RENAMED.get(name, name)] = [part.clone() for part in column]
    return data


def taken_over(data: Mapping[str, Any], tensors: TrainTensors, source: str) -> TrainTensors:
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
    for name, column in _columns(tensors):
        key = _RENAMED.get(name, name)
        if [len(part) for part in column] != [len(mask) for mask in tensors.loss_masks]:
            continue
        if key not in data:
            raise PluginError(f'{source}: rollout_data["{key}"] is gone; change it in place or set it anew')
        changed[name] = _checked(data[key], column, f'{source}: rollout_data["{key}"]')
    if any(bool(((mask != 0) & (mask != 1)).any()) for mask in changed["loss_masks"]):
        raise PluginError(f'{source}: rollout_data["loss_masks"] must hold 0 and 1 only')
    return replace(tensors, **changed)


def micro_batch_data(batch: TrainBatch, tensors: TrainTensors, output: MicroBatchOutput) -> dict[str, Any]:
    """Return THUDM/slime's `batch` of one micro-batch: `rollout_data` of its samples.

    `unconcat_tokens` are the tokens per sample, and `tokens` [1, T] all of them. `log_probs` are the old policy's; if a
    step is its own old policy, they are the current log-probs without gradient.
    """
    positions = output.positions
    part = batch.select(positions)
    device = output.log_probs.device
    data = part.to_rollout_data()
    lists = [torch.tensor(row, device=device) for row in part.tokens]
    data |= {"unconcat_tokens": lists, "tokens": torch.cat(lists)[None]}
    data |= {_RENAMED.get(name, name): [column[p] for p in positions] for name, column in _columns(tensors)}
    if tensors.advantages is not None and tensors.old_log_probs is None:
        data["log_probs"] = list(torch.split(output.log_probs.detach(), part.response_lengths))
    return data


def _columns(tensors: TrainTensors) -> list[tuple[str, Column]]:
    found = ((field.name, getattr(tensors, field.name)) for field in fields(tensors))
    return [(name, column) for name, column in found if column is not None]


def _checked(value: Any, before: Column, source: str) -> Column:
    if not isinstance(value, Sequence):
        raise PluginError(f"{source} is a {type(value).__name__}; expected a list of {len(before)} tensors")
    try:
        parts = [torch.as_tensor(part, dtype=torch.float32).detach() for part in value]
    except (TypeError, ValueError, RuntimeError) as error:
        raise PluginError(f"{source}: expected a list of tensors: {error}") from error
    shapes, expected = [tuple(part.shape) for part in parts], [tuple(part.shape) for part in before]
    if shapes != expected:
        raise PluginError(f"{source} has shapes {shapes[:8]}; expected one tensor per sample: {expected[:8]}")
    return [part.to(column.device) for part, column in zip(parts, before)]
