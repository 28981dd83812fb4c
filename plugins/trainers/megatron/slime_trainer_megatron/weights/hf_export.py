"""This trainer's model as an HF directory: config, tokenizer, and the weights of all ranks, shard by shard.

Checkpoints and `slime convert megatron-to-hf` call it on every rank. Weights that the model has no place for
(multi-token prediction) are copied from the directory it was made of into every export, but they are no part of a
weight sync: engines have them from their own start, and nothing here changes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_core.models.hf_io import INDEX, WEIGHTS, copy_assets, write_config, write_weights
from slime_trainer_megatron.families.family import MegatronModel
from slime_trainer_megatron.weights.weights_in import SCALE, opened


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
