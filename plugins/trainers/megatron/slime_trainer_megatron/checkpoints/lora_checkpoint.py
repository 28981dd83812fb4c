"""The Megatron trainer's checkpoints with adapters: `DIR/adapter` in PEFT's layout, and the optimizer's sharded form.

`checkpoint.py` calls these functions on every rank, inside `on_device`. Rank 0 writes the whole adapters; every rank
reads its parts, in any layout. The base comes from `--hf-checkpoint`; the merged model stored with the adapters is read
only to check that it has the same base.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from slime_embedded.models.lora import FOLDER, read_adapter, same_weight, write_adapter

from slime_core.errors import CheckpointError
from slime_core.models.hf_io import weight_files
from slime_trainer_megatron.checkpoints.dist_checkpoint import load_parts
from slime_trainer_megatron.families.family import places
from slime_trainer_megatron.families.weight_map import Gated, GatedFused
from slime_trainer_megatron.weights.lora import DOWN, Adapters, is_adapter
from slime_trainer_megatron.weights.parameters import gathered, part_of
from slime_trainer_megatron.weights.weights_out import hf_weights

if TYPE_CHECKING:
    from slime_trainer_megatron.trainer import MegatronTrainer


def save_adapters(trainer: MegatronTrainer, directory: Path) -> None:
    """Write `directory/adapter`; collective."""
    adapters = _adapters(trainer)

    def only_adapters(parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.data if id(parameter) in own else None

    own = {id(place.parameter) for place in adapters.parameters()}
    tensors = {
        name: tensor.to("cpu", copy=True)
        for name, tensor in hf_weights(adapters.chunks, adapters.family, what=only_adapters)
    }
    if trainer.groups.rank == 0:
        write_adapter(directory / FOLDER, adapters.lora, tensors, _modules(adapters), trainer.settings.hf_checkpoint)


def load_adapters(trainer: MegatronTrainer, directory: Path) -> None:
    """Restore the adapters, bit for bit; collective.

    Raises:
        CheckpointError: The adapters are missing, do not fit this run, or have another base than `--hf-checkpoint`.
    """
    if not (directory / FOLDER).is_dir():
        raise CheckpointError(
            f"{directory}: no adapters in it (no {FOLDER}/), as it was trained without --lora-rank; to train adapters"
            " on its weights, name it as --hf-checkpoint"
        )
    adapters = _adapters(trainer)
    stored = {name: torch.empty(shape) for name, shape in _shapes(adapters).items()}
    read_adapter(directory / FOLDER, adapters.lora, stored)
    with torch.no_grad():
        for place in adapters.parameters():
            part = part_of(place.row)
            tensors = [stored[name] for name in place.hf]
            place.parameter.copy_(place.row.merge.to_megatron(tensors, part.rank, part.size))
    problems = gathered(_other_base(trainer, directory))
    if problem := next(filter(None, problems), None):
        raise CheckpointError(problem)


def sharded_adapters(adapters: Adapters) -> dict[str, Any]:
    """Return this rank's adapters for `megatron.core.dist_checkpointing`, by their names in the whole model.

    They can be loaded in other layouts.
    """
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

    found: dict[str, Any] = {}
    for place in adapters.parameters():
        axis = getattr(place.parameter, "partition_dim", -1)
        if axis == -1:
            found[place.name] = make_sharded_tensor_for_checkpoint(place.parameter, place.name)
            continue
        sharded = make_tp_sharded_tensor_for_checkpoint(place.parameter, place.name, tp_axis=axis)
        gated = axis == 0 and isinstance(getattr(place.row.merge, "linear", None), (Gated, GatedFused))
        # Gate and up projection of each rank are adjacent, as in Megatron's linear.
        found[place.name] = apply_swiglu_sharded_factory(sharded, ()) if gated else sharded
    return found


def load_sharded_adapters(adapters: Adapters, folder: Path) -> None:
    """Load the written `sharded_adapters`, of any layout, into the adapters.

    Raises:
        CheckpointError: The stored adapters do not fit, or cannot be read.
    """
    found = load_parts(sharded_adapters(adapters), folder)
    with torch.no_grad():
        for place in adapters.parameters():
            place.parameter.copy_(found[place.name])


def _adapters(trainer: MegatronTrainer) -> Adapters:
    adapters = trainer.models.adapters
    assert adapters is not None, "called for runs with --lora-rank"
    return adapters


def _modules(adapters: Adapters) -> list[str]:
    """Return the HF names of all modules of the model that have parameters."""
    names = [name for place in places(adapters.family) for name in place.hf if not is_adapter(name)]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _shapes(adapters: Adapters) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all adapters of the whole model, by HF name."""
    own: dict[str, tuple[int, ...]] = {}
    for place in adapters.parameters():
        parts = [torch.empty_like(place.parameter, device="meta")] * part_of(place.row).size
        own |= {name: tuple(t.shape) for name, t in zip(place.hf, place.row.merge.to_hf(parts), strict=True)}
    return {name: shape for shapes in gathered(own) for name, shape in shapes.items()}


def _other_base(trainer: MegatronTrainer, directory: Path) -> str:
    """Return on rank 0 why the stored merged model has another base; "" if it has the same, and on other ranks."""
    adapters = _adapters(trainer)
    adapted = {
        f"{name.rpartition('.')[0]}.weight"
        for place in places(adapters.family)
        for name in place.hf
        if name.endswith(f".{DOWN}")
    }
    problem = ""
    weights = trainer.named_weights()
    if trainer.groups.rank:
        for _ in weights:
            raise AssertionError("only rank 0 gets weights")
        return problem
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in weight_files(directory):
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= dict.fromkeys(file.keys(), file)
        for name, tensor in weights:
            there = files[name].get_tensor(name) if name in files else None
            if not problem and (there is None or not same_weight(there, tensor, adapted=name in adapted)):
                problem = (
                    f"{directory}: its adapters were trained on other weights than --hf-checkpoint"
                    f" {trainer.settings.hf_checkpoint}: merged, {name} is not what is stored; name the checkpoint they"
                    " started from"
                )
    return problem
