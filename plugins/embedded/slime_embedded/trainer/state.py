"""Files of a trainer's checkpoint, written by `EmbeddedTrainer.save` and read back by `load`, bit for bit.

    DIR/model.safetensors, config.json, tokenizer files   an HF-layout model
    DIR/adapter/                              with LoRA: the adapters in PEFT's format; the model above is merged
    DIR/adapters/NAME/                        each of --lora-adapters: the same files, and its own trainer/
    DIR/trainer/state.json                    counters, schedule, trained parameters, world size, rank 0's RNG
    DIR/trainer/rng_<rank>.json               RNG of the other ranks
    DIR/trainer/optimizer.safetensors         moments under exp_avg.<name> and exp_avg_sq.<name>
    DIR/trainer/shards/                       with fsdp, weights and moments; then optimizer.safetensors is empty
    DIR/trainer/master.safetensors            float32 weights, only when the model is stored in another dtype
    DIR/trainer/reference.safetensors         the reference, only once it differs from its checkpoint
    DIR/trainer/old_actor.safetensors         the old actor, only where it differs from the actor

Safetensors and JSON only. The caller makes the save atomic: it passes a directory and publishes it after `save`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slime_core.errors import CheckpointError, ConfigError
from slime_core.models.config import ModelConfig
from slime_core.models.hf_io import (
    SHARD_BYTES,
    copy_assets,
    read_json,
    weight_files,
    write_config,
    write_weights,
)
from slime_embedded.models.stored import read_into
from slime_embedded.trainer.optimizer import FlatAdamW
from slime_embedded.trainer.settings import TrainerSettings
from slime_embedded.trainer.state_files import capture_rng, restore_rng, restored_states, write_json

_FORMAT = 1
_TIED = "lm_head.weight"
"""Tensor that files of a tied model may have and the model has not."""
FOLDER, _STATE, _OPTIMIZER = "trainer", "state.json", "optimizer.safetensors"
_MASTER, REFERENCE, OLD_ACTOR = "master.safetensors", "reference.safetensors", "old_actor.safetensors"
TEACHER = "teacher.safetensors"


def save_model(
    directory: Path,
    weights: Mapping[str, torch.Tensor],
    config: ModelConfig,
    assets: str,
    dtype: torch.dtype,
    *,
    others: Iterable[tuple[str, torch.Tensor]] = (),
    exact: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write an HF-layout model in `dtype`; with `exact`, also write the float32 weights if `dtype` is not float32.

    `others` are tensors of its files that the trainer does not hold.
    """
    write_model(directory, chain(weights.items(), others), config, assets, dtype, shard_bytes=shard_bytes)
    if exact and dtype != torch.float32:
        _write_tensors(directory / FOLDER / _MASTER, weights)


def write_model(
    directory: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    config: ModelConfig,
    assets: str,
    dtype: torch.dtype,
    *,
    shard_bytes: int,
) -> None:
    """Write an HF-layout model in `dtype`, tensor by tensor."""
    copy_assets(assets, directory)
    hf = {key: value for key, value in config.hf.items() if key != "torch_dtype"}
    write_config(directory, {**hf, "dtype": str(dtype).removeprefix("torch.")})
    write_weights(directory, ((name, tensor.to(dtype)) for name, tensor in weights), shard_bytes=shard_bytes)


def load_model(
    directory: Path, into: Mapping[str, torch.Tensor], others: Callable[[str], bool] = lambda name: False
) -> None:
    """Copy the stored weights into the tensors of `into`; prefer the float32 weights if they were written.

    `others` returns whether a name is of a tensor that the trainer does not hold.
    """
    master = directory / FOLDER / _MASTER
    try:
        files = [master] if master.is_file() else weight_files(directory)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    read_into(files, into, lambda name: _TIED if others(name) else name, ignore=_TIED)


def save_frozen(directory: Path, name: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Write the weights of a model that is not trained; `name` is REFERENCE, TEACHER or OLD_ACTOR."""
    _write_tensors(directory / FOLDER / name, weights)


def load_frozen(directory: Path, name: str, into: Mapping[str, torch.Tensor]) -> bool:
    """Copy the weights that `save_frozen` wrote to `into`; return False if the checkpoint has none."""
    path = directory / FOLDER / name
    if not path.is_file():
        return False
    read_into([path], into)
    return True


def save_progress(directory: Path, optimizer: FlatAdamW, settings: TrainerSettings, rank: int, world_size: int) -> None:
    """Write counters, RNG and moments: rank 0 writes state.json and the moments, other ranks only their RNG."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    rng = capture_rng() if settings.save_rng else None
    if rank:
        write_json(folder / f"rng_{rank}.json", {"rng": rng})
        return
    state: dict[str, Any] = {
        "format": _FORMAT,
        "world_size": world_size,
        "parameters": {name: list(shape) for name, shape in optimizer.shapes.items()},
        "rng": rng,
        "optimizer": None,
    }
    if settings.save_optim:
        state["optimizer"] = {
            "steps": optimizer.steps,
            "moment_steps": optimizer.moment_steps,
            "stateless": optimizer.settings.stateless,
            "schedule": optimizer.schedule.facts(),
        }
        _write_tensors(folder / _OPTIMIZER, optimizer.moments())
    write_json(folder / _STATE, state)


def load_progress(directory: Path, optimizer: FlatAdamW, settings: TrainerSettings, rank: int, world_size: int) -> None:
    """Restore the parts of `save_progress` that the settings select.

    Raises:
        CheckpointError: The checkpoint does not fit this run; every difference is listed.
    """
    if not (settings.load_optim or settings.load_rng):
        return
    folder = directory / FOLDER
    if not (folder / _STATE).is_file():
        raise CheckpointError(
            f"{directory}: no trainer state (no {FOLDER}/{_STATE}); to start from its weights alone, use"
            " --finetune, or name it as --hf-checkpoint instead of --load"
        )
    state = read_json(folder / _STATE)
    if state.get("format") != _FORMAT:
        raise CheckpointError(f"{folder / _STATE}: format {state.get('format')}, this version reads {_FORMAT}")
    problems = _differences(state, optimizer, settings)
    if problems:
        raise CheckpointError(f"{directory} does not fit this run:\n  " + "\n  ".join(problems))
    if settings.load_optim:
        stored = state["optimizer"]
        read_into([folder / _OPTIMIZER], optimizer.moments())
        optimizer.restore(int(stored["steps"]), int(stored["moment_steps"]))
    # The Megatron trainer stores the process count under another name, and also has an RNG file for rank 0.
    saved_by = int(state["world_size"] if "world_size" in state else state["processes"])
    if settings.load_rng and restored_states(saved_by, world_size, rank):
        own = rank == 0 and "world_size" in state
        restore_rng((state if own else read_json(folder / f"rng_{rank}.json"))["rng"])


def _differences(state: Mapping[str, Any], optimizer: FlatAdamW, settings: TrainerSettings) -> list[str]:
    problems: list[str] = []
    if settings.load_optim and "parameters" not in state:
        problems.append("the optimizer's state is another trainer's: add --no-load-optim to begin with a fresh one")
    elif settings.load_optim:
        problems += _optimizer_differences(state, optimizer, settings)
    if settings.load_rng and not state["rng"]:
        problems.append("it was saved with --no-save-rng: add --no-load-rng")
    return problems


def _optimizer_differences(state: Mapping[str, Any], optimizer: FlatAdamW, settings: TrainerSettings) -> list[str]:
    stored = state["optimizer"]
    if stored is None:
        return ["it was saved with --no-save-optim: add --no-load-optim"]
    problems = []
    if stored["stateless"] != optimizer.settings.stateless:
        problems.append("--use-stateless-adam differs: set it as it was, or add --no-load-optim")
    saved = {name: tuple(shape) for name, shape in state["parameters"].items()}
    for name in saved.keys() | optimizer.shapes.keys():
        before, now = saved.get(name), optimizer.shapes.get(name)
        if before != now:
            problems.append(f"trained parameter {name}: {before or 'not trained'} then, {now or 'not trained'} now")
    problems.sort()
    facts, before_facts = optimizer.schedule.facts(), stored["schedule"]
    changed = [k for k in facts.keys() | before_facts.keys() if facts.get(k) != before_facts.get(k)]
    if changed and not settings.override_schedule:
        shown = ", ".join(f"{k} {before_facts.get(k)} then, {facts.get(k)} now" for k in sorted(changed))
        problems.append(f"learning-rate schedule: {shown}; add --override-opt-param-scheduler to take this run's")
    return problems


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}, path)
