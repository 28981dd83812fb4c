"""`slime convert`: convert an HF directory to a Megatron directory, and back.

    DIR/config.json, tokenizer files   as in the HF directory, with the dtype of the weights
    DIR/model/                         weights, by megatron.core.dist_checkpointing, as in `trainer/` of commits
    DIR/megatron.json                  format, family, dtype; written last

The command calls it in every process of the layout, one for a model that fits into one. Tensors are read and written
one after the other, so a process needs memory for its part of the model and one shard. No layout is remembered;
whichever made the files, every other one reads them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from slime_embedded.trainer.shared_settings import DTYPES

from slime_core.checkpoint.sources import MEGATRON, MODEL, Source, required_source
from slime_core.errors import CheckpointError, ConfigError
from slime_core.models.config import read_hf_config
from slime_core.models.hf_io import copy_assets, write_config
from slime_core.protocols import Args
from slime_trainer_megatron.arguments.config import transformer_config
from slime_trainer_megatron.checkpoints import dist_checkpoint
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.families.family import MegatronModel, load_megatron_model
from slime_trainer_megatron.installed import check_version
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.model.build import build_model
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.weights.weights_in import load_hf
from slime_trainer_megatron.weights.weights_out import export_hf, hf_weights

_EIGHT_BIT = "bfloat16"
"""Dtype of dequantised block-quantised weights if config.json has no dtype."""


def hf_to_megatron(args: Args) -> str:
    """Convert `--hf-checkpoint` to `--save`; every process of the layout calls it.

    Args:
        args: Settings: also the flags of the layout, `device` (auto is cpu), `dtype` (auto is config.json's).

    Returns:
        What was done, in a line.

    Raises:
        ConfigError: A directory is not what it should be, or the layout does not fit.
        CheckpointError: The weights do not fit config.json, or cannot be written.
    """
    assert args.save, "required by the command"
    source = required_source(args.hf_checkpoint, cite=f"--hf-checkpoint {args.hf_checkpoint}")
    if not source.has_hf:
        raise ConfigError(f"--hf-checkpoint {args.hf_checkpoint}: its weights are in Megatron's format already")
    hf = read_hf_config(source.directory)
    dtype = args.dtype if args.dtype != "auto" else _dtype_of(hf)
    with _model(args, source, dtype) as (model, chunks), _new_directory(args.save) as partial:
        load_hf(chunks, model, source.directory)
        if dist.get_rank() == 0:
            copy_assets(source.directory, partial)
            plain = {key: value for key, value in hf.items() if key not in ("torch_dtype", "quantization_config")}
            write_config(partial, {**plain, "dtype": dtype})
            (partial / MODEL).mkdir()
        dist.barrier()
        dist_checkpoint.save_model(chunks, partial / MODEL)
        if dist.get_rank() == 0:
            text = json.dumps({"format": 1, "model_type": hf["model_type"], "dtype": dtype}, indent=1)
            (partial / MEGATRON).write_text(text + "\n", encoding="utf-8")  # last: it marks the directory as complete
    return f"{args.save}: {hf['model_type']} in Megatron's format, {dtype}, from {source} {source.directory}"


def megatron_to_hf(args: Args, *, dtype: torch.dtype | None = None) -> str:
    """Convert `--load` to `--save`; every process of the layout calls it.

    Args:
        args: Settings: also the flags of the layout, `hf_checkpoint` (with the tokenizer and the weights that the model
            carries along; not needed where `--load` is a commit), `ckpt_step`, `save_shard_size`, `device`.
        dtype: Of the weights; without, they stay as they are.

    Returns:
        What was done, in a line.

    Raises:
        ConfigError: A directory is not what it should be, or the layout does not fit.
        CheckpointError: The weights cannot be read or written.
    """
    assert args.load, "required by the command"
    assert args.save, "required by the command"
    source = required_source(args.load, args.ckpt_step, cite=f"--load {args.load}")
    if source.megatron is None:
        raise ConfigError(f"--load {args.load}: is {source}: there is nothing to convert")
    assets = _assets(args, source)
    check_version()  # before the next line imports Megatron
    stored = dist_checkpoint.stored_dtype(source.megatron)
    with _model(args, source, str(stored).removeprefix("torch.")) as (model, chunks), _new_directory(args.save) as to:
        dist_checkpoint.load_model(chunks, source.megatron)
        export_hf(
            hf_weights(chunks, model),
            model,
            to,
            hf=read_hf_config(source.directory),
            assets=assets,
            dtype=dtype or stored,
            cast=dtype is not None,
            shard_bytes=int(args.save_shard_size * 1e9),
        )
    return f"{args.save}: {read_hf_config(args.save)['model_type']} in HF's format, from {source} {source.directory}"


def _assets(args: Args, source: Source) -> Path:
    """Return the HF directory of the tokenizer and the carried weights."""
    if args.hf_checkpoint:
        found = required_source(args.hf_checkpoint, cite=f"--hf-checkpoint {args.hf_checkpoint}")
        ours, theirs = (load_megatron_model(d.directory).architecture for d in (source, found))
        if ours != theirs:
            raise ConfigError(f"--hf-checkpoint {args.hf_checkpoint}: another architecture than --load {args.load}")
        return found.directory
    if source.has_hf:
        return source.directory
    raise ConfigError("--hf-checkpoint is required: the HF model it was made from, for the tokenizer and other files")


def _dtype_of(hf: dict[str, Any]) -> str:
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or _EIGHT_BIT)
    if dtype not in DTYPES:
        raise ConfigError(
            f"config.json: dtype {dtype}: allowed are {', '.join(DTYPES)}; add --dtype float32 or bfloat16"
        )
    return dtype


@contextmanager
def _model(args: Args, source: Source, dtype: str) -> Iterator[tuple[MegatronModel, list[Any]]]:
    """Build this rank's part of the source's model, without weights, in its own process groups."""
    model = load_megatron_model(source.directory)
    layout = Layout.from_args(args, model.architecture.num_layers)
    layout.check_model(model.architecture.transformer)
    device = "cpu" if args.device == "auto" else args.device
    own = args.model_copy(update={"hf_checkpoint": str(source.directory), "dtype": dtype, "device": device})
    groups = ProcessGroups(layout, device, args.distributed_timeout_minutes)
    try:
        with on_device(groups.device):
            config = transformer_config(own, model.architecture, layout, device=groups.device)
            config.perform_initialization = False  # all weights are read from the source
            yield model, build_model(own, model, config, layout)
    finally:
        groups.close()


@contextmanager
def _new_directory(path: str) -> Iterator[Path]:
    """Create a temporary directory next to `path` and rename it to `path` once everything is written; for all ranks.

    Raises:
        ConfigError: `path` already exists.
        CheckpointError: The file system reported an error.
    """
    target = Path(path)
    partial = target.with_name(f".partial-{target.name}")
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise ConfigError(f"--save {path}: is there already; choose another, or remove it")
    dist.barrier()
    try:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        yield partial
        dist.barrier()
        if dist.get_rank() == 0:
            if target.exists():
                target.rmdir()
            os.rename(partial, target)
        dist.barrier()
    except OSError as error:
        raise CheckpointError(f"--save {path}: {error}") from error
