"""Files of a Megatron trainer's checkpoint: what `MegatronTrainer.save` writes and `load` reads back.

    DIR/model*.safetensors, config.json, tokenizer files   an HF-layout model (`weights_out.py`)
    DIR/trainer/state.json               counters, schedule, number of processes
    DIR/trainer/rng_<rank>.json          random states of each process
    DIR/trainer/model/                   weights as trained, by megatron.core.dist_checkpointing
    DIR/adapter/                         with `--lora-rank` in place of those, in PEFT's layout (`lora_checkpoint.py`)
    DIR/trainer/optimizer/               float32 weights and moments, in its fully reshardable form
    DIR/trainer/reference/               the reference, only once it differs from its checkpoint
    DIR/trainer/old_actor/               the old actor, only where it differs from the actor

Every rank calls both functions, inside `on_device`. The caller makes the write atomic. Every layout can read the files
of any other; in the same layout, training continues bit for bit. Torch's AdamW has no state before its first step, and
missing state is neither saved nor loaded. So the state is created, as zeros, before saving and loading.

Convert the random states of a trainer process to JSON values and back: torch's, Python's, numpy's, Megatron's.

`checkpoint.py` calls this module. Megatron switches between named states of the GPU's generator (for dropout that is
equal or different on tensor-parallel ranks). torch holds only the state in use; Megatron stores the others.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from slime_embedded.trainer.critic import critic_hf
from slime_embedded.trainer.state_files import capture_rng, restore_rng, restored_states, write_json

from slime_core.checkpoint.sources import MODEL, TRAINER
from slime_core.errors import CheckpointError
from slime_core.models.config import read_hf_config
from slime_core.models.hf_io import read_json
from slime_trainer_megatron.checkpoints import dist_checkpoint
from slime_trainer_megatron.checkpoints.lora_checkpoint import (
    load_adapters,
    load_sharded_adapters,
    save_adapters,
    sharded_adapters,
)
from slime_trainer_megatron.weights.load_model import load_weights
from slime_trainer_megatron.weights.parameters import gathered
from slime_trainer_megatron.weights.weights_out import export_hf

if TYPE_CHECKING:
    from slime_trainer_megatron.trainer import MegatronTrainer

FORMAT = 1
STATE, OPTIMIZER = "state.json", "optimizer"
FROZEN = {"ref": "reference", "old_actor": "old_actor"}
"""Set of frozen weights -> folder."""


def save_checkpoint(trainer: MegatronTrainer, directory: Path) -> None:
    """Write everything; returns on every rank when every rank has written."""
    folder, settings = directory / TRAINER, trainer.settings
    frozen = _frozen_to_save(trainer)
    if trainer.groups.rank == 0:
        model = [MODEL] if trainer.models.adapters is None else []
        for name in (*model, *([OPTIMIZER] if settings.save_optim else []), *(FROZEN[name] for name in frozen)):
            (folder / name).mkdir(parents=True, exist_ok=True)
    _save_hf(trainer, directory)
    trainer.groups.barrier()
    if trainer.models.adapters is None:
        dist_checkpoint.save_model(trainer.models.chunks, folder / MODEL)
    else:
        save_adapters(trainer, directory)
    if settings.save_optim:
        trainer.optimizer.make_moments()
        dist_checkpoint.save_optimizer(trainer.optimizer.parts(), _changing(trainer), folder / OPTIMIZER)
    for name in frozen:
        with trainer.models.sets.swapped_in(name):
            dist_checkpoint.save_parts(_changing(trainer), folder / FROZEN[name])
    rng = capture() if settings.save_rng else None
    write_json(folder / f"rng_{trainer.groups.rank}.json", {"rng": rng})
    moment_steps = max(gathered(trainer.optimizer.moment_steps))
    if trainer.groups.rank == 0:
        write_json(folder / STATE, _facts(trainer, moment_steps))
    trainer.groups.barrier()


def load_checkpoint(trainer: MegatronTrainer, directory: Path) -> None:
    """Restore the parts of a checkpoint that the settings select; `--finetune` accepts any model's weights.

    Raises:
        CheckpointError: The checkpoint is incomplete or does not fit this run; every difference is listed.
    """
    folder, settings = directory / TRAINER, trainer.settings
    progress = not settings.finetune
    state = _state(directory) if progress and (settings.load_optim or settings.load_rng) else None
    if state is not None:
        _check(state, trainer, directory)
    if trainer.models.adapters is None:
        load_weights(trainer.models.chunks, trainer.models.family, directory)
    else:
        load_adapters(trainer, directory)
    trainer.optimizer.take_weights()
    if state is not None and settings.load_optim:
        _load_optimizer(trainer, folder / OPTIMIZER, int(state["optimizer"]["moment_steps"]))
        trainer.optimizer.scheduler.load_state_dict(state["optimizer"])
    _load_frozen(trainer, folder, progress=progress)
    rank, processes = trainer.groups.rank, trainer.groups.world_size
    if state is not None and settings.load_rng and restored_states(_processes(state), processes, rank):
        kept = state if "world_size" in state else read_json(folder / f"rng_{rank}.json")
        restore(kept["rng"])
    trainer.groups.barrier()


def _save_hf(trainer: MegatronTrainer, directory: Path) -> None:
    settings = trainer.settings
    hf = read_hf_config(settings.hf_checkpoint)
    export_hf(
        trainer.named_weights(),
        trainer.models.family,
        directory,
        hf=critic_hf(hf) if trainer.role == "critic" else hf,
        assets=settings.hf_checkpoint,
        dtype=settings.save_dtype,
        shard_bytes=settings.save_shard_bytes,
    )


# -- models that are not trained -------------------------------------------------------------------------


def _frozen_to_save(trainer: MegatronTrainer) -> list[str]:
    """Return the sets of weights that exist nowhere else; the same on every rank."""
    names = ["ref"] if trainer.reference_moved else []
    sets = trainer.models.sets
    if "old_actor" in sets and not all(gathered(sets.is_model("old_actor"))):
        names.append("old_actor")
    return names


def _load_frozen(trainer: MegatronTrainer, folder: Path, *, progress: bool) -> None:
    """Load the frozen weights, after the actor.

    A reference that is not stored stays as at the start of a run. An old actor that is not stored becomes the actor.
    """
    sets = trainer.models.sets
    for name, place in FROZEN.items():
        if name not in sets:
            continue
        if progress and (folder / place).is_dir():
            with sets.swapped_in(name):
                if trainer.models.adapters is None:
                    dist_checkpoint.load_model(trainer.models.chunks, folder / place)
                else:
                    load_sharded_adapters(trainer.models.adapters, folder / place)
                sets.keep(name)
            trainer.reference_moved |= name == "ref"
        elif name == "old_actor":
            sets.keep(name)


def _changing(trainer: MegatronTrainer) -> dict[str, Any]:
    """Return this rank's parts of the trained weights: the model, or its adapters."""
    models = trainer.models
    return dist_checkpoint.model_state(models.chunks) if models.adapters is None else sharded_adapters(models.adapters)


# -- optimizer -------------------------------------------------------------------------------------------


def _load_optimizer(trainer: MegatronTrainer, folder: Path, moment_steps: int) -> None:
    optimizer = trainer.optimizer
    optimizer.make_moments()
    # Megatron's undistributed optimizers omit a counter of 0 when saving, but require it (optimizer.py, "common_step").
    optimizer.set_moment_steps(max(moment_steps, 1))
    dist_checkpoint.load_optimizer(optimizer.parts(), _changing(trainer), folder)
    optimizer.set_moment_steps(moment_steps)


# -- state.json ------------------------------------------------------------------------------------------


def _facts(trainer: MegatronTrainer, moment_steps: int) -> dict[str, Any]:
    optimizer = trainer.optimizer
    saved = {"stateless": optimizer.stateless, "moment_steps": moment_steps, **optimizer.scheduler.state_dict()}
    return {
        "format": FORMAT,
        "processes": trainer.groups.world_size,
        "layout": vars(trainer.settings.layout),
        "rng": trainer.settings.save_rng,
        "optimizer": saved if trainer.settings.save_optim else None,
    }


def _state(directory: Path) -> dict[str, Any]:
    path = directory / TRAINER / STATE
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: no trainer state (no {TRAINER}/{STATE}); to start from its weights alone, use --finetune"
        )
    state = read_json(path)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {state.get('format')}, this version reads {FORMAT}")
    return state


def _processes(state: Mapping[str, Any]) -> int:
    """Return the number of processes that saved it; the embedded trainer stores the number under another name."""
    return int(state["processes"] if "processes" in state else state["world_size"])


def _check(state: Mapping[str, Any], trainer: MegatronTrainer, directory: Path) -> None:
    settings, processes = trainer.settings, trainer.groups.world_size
    problems = []
    if settings.load_optim and "processes" not in state:
        problems.append("the optimizer's state is another trainer's: add --no-load-optim to begin with a fresh one")
    elif settings.load_optim:
        problems += _optimizer_differences(state["optimizer"], trainer)
    if settings.load_rng and not state["rng"]:
        problems.append("it was saved with --no-save-rng: add --no-load-rng")
    elif settings.load_rng and _processes(state) != processes and _draws(trainer.models.config):
        problems.append(
            f"saved by {_processes(state)} processes, this run has {processes}, and training draws random numbers"
            " (dropout): start as many, or add --no-load-rng to go on with fresh random states"
        )
    if any(gathered(bool(problems))):
        raise CheckpointError(f"{directory} does not fit this run:\n  " + "\n  ".join(problems))


def _draws(config: Any) -> bool:
    """Return whether Megatron draws random numbers in training."""
    return bool(config.hidden_dropout or config.attention_dropout or config.moe_input_jitter_eps)


def _optimizer_differences(stored: Mapping[str, Any] | None, trainer: MegatronTrainer) -> list[str]:
    if stored is None:
        return ["it was saved with --no-save-optim: add --no-load-optim"]
    problems = []
    if stored["stateless"] != trainer.optimizer.stateless:
        problems.append("--use-stateless-adam differs: set it as it was, or add --no-load-optim")
    now, before = trainer.optimizer.scheduler.schedule.facts(), stored["schedule"]
    changed = sorted(k for k in now.keys() | before.keys() if now.get(k) != before.get(k))
    if changed and not trainer.settings.override_schedule:
        shown = ", ".join(f"{k} {before.get(k)} then, {now.get(k)} now" for k in changed)
        problems.append(f"learning-rate schedule: {shown}; add --override-opt-param-scheduler to take this run's")
    return problems


_MEGATRON = "megatron"


def capture() -> dict[str, Any]:
    """Return the states as JSON values."""
    states = {name: tensor for name, tensor in _tracked().items() if isinstance(tensor, torch.Tensor)}
    encoded = {name: base64.b64encode(tensor.cpu().numpy().tobytes()).decode() for name, tensor in states.items()}
    return {**capture_rng(), _MEGATRON: encoded}


def restore(state: dict[str, Any]) -> None:
    """Restore the states of `capture`; states with names unknown to this process are skipped."""
    restore_rng(state)
    own, stored = _tracked(), state.get(_MEGATRON, {})
    for name in own.keys() & stored.keys():
        if isinstance(own[name], torch.Tensor):
            own[name] = torch.frombuffer(bytearray(base64.b64decode(stored[name])), dtype=torch.uint8)
    if stored:
        _tracker().set_states(own)


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _tracked() -> dict[str, Any]:
    """Return a copy of name -> state; with CUDA graphs, Megatron has generators instead, which are not changed."""
    tracker = _tracker()
    return dict(tracker.get_states()) if tracker.is_initialized() else {}
