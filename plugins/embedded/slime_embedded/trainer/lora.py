"""LoRA in the embedded trainer: models that share the base's memory, steps by adapter, and checkpoints with adapters.

A checkpoint holds the merged model, for serving and evaluation, and `adapter/` in PEFT's layout. A run resumes from the
adapters and reads the base from `--hf-checkpoint` again. On resume it also reads the merged model, to check that the
adapters were trained on this base.

With `--lora-adapters` each name is another model on the same base, with an optimizer of its own, so an adapter is
trained as in a run of its own. A checkpoint has it in `adapters/NAME/`, with its optimizer's state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from slime_core.errors import CheckpointError, TrainError
from slime_core.sample import TrainBatch
from slime_embedded.hf.files import WeightFiles, in_files
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.lora import FOLDER, LoraSettings, module_of, read_adapter, same_weight, write_adapter
from slime_embedded.models.lora_linear import ADAPTERS, UP, LoraLinear, adapter_weights, add_adapters, merged_weights
from slime_embedded.trainer.optimizer import FlatAdamW
from slime_embedded.trainer.settings import TrainerSettings

SHARED = "shared"
"""Name in metrics of the adapter of samples that name none."""


def base_of(model: Decoder) -> Decoder:
    """Return the model without its adapters; both share the same memory."""
    base = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    adapted = [(name, module) for name, module in base.named_modules() if isinstance(module, LoraLinear)]
    for name, module in adapted:
        rows, columns = module.weight.shape
        linear = torch.nn.Linear(columns, rows, bias=module.bias is not None, device="meta")
        linear.weight = module.weight
        if module.bias is not None:
            linear.bias = module.bias
        base.set_submodule(name, linear)
    return base.requires_grad_(False)


def with_adapter(model: Decoder, settings: TrainerSettings, seed: int, name: str) -> Decoder:
    """Return the model with the adapter `name` in place of its own; both share the base's memory."""
    assert settings.lora is not None
    other = base_of(model)
    add_adapters(other, settings.lora, seed, merge=settings.batch_invariant, adapter=name)
    return other


def by_adapter(batch: TrainBatch, positions: Sequence[int], known: Collection[str]) -> dict[str, list[int]]:
    """Return the positions by the adapter of their samples, "" for the shared one.

    Raises:
        TrainError: A sample names an adapter that is not `known`.
    """
    found: dict[str, list[int]] = {}
    for position in positions:
        given = batch.train_metadata[position] if batch.train_metadata else None
        name = (given or {}).get("adapter") or ""
        if name not in known:
            raise TrainError(
                f"sample {batch.sample_indices[position]}: its train_metadata names the adapter {name!r};"
                f" --lora-adapters has {' '.join(filter(None, known))}"
            )
        found.setdefault(name, []).append(position)
    return found


def step_adapters(optimizers: Mapping[str, FlatAdamW], trained: Sequence[float]) -> dict[str, float]:
    """Take an optimizer step of each adapter of which a token is trained; the others stay as they are.

    Args:
        optimizers: Optimizers by the adapters' names, "" for the shared one.
        trained: Number of trained tokens of each, on all ranks.

    Returns:
        The metrics of `FlatAdamW.step`: the norm of all gradients, the largest learning rate, the number of adapters
        whose step was skipped; and `grad_norm/NAME` of each adapter.
    """
    found = {name: optimizer.step() for (name, optimizer), count in zip(optimizers.items(), trained) if count}
    first = next(iter(optimizers.values()))
    norms = {name: found[name]["grad_norm"] if name in found else 0.0 for name in optimizers}
    return {
        "grad_norm": math.hypot(*norms.values()),
        "lr": max(each["lr"] for each in found.values()) if found else first.schedule.at(first.steps),
        "skipped_steps": sum(each["skipped_steps"] for each in found.values()),
        **{f"grad_norm/{name or SHARED}": norm for name, norm in norms.items()},
    }


def check_adapters(directory: Path, names: Collection[str]) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the adapters `names`, besides the shared one."""
    folder = directory / ADAPTERS
    stored = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    if stored != set(names):
        then, now = (" ".join(sorted(some)) or "not given" for some in (stored, names))
        raise CheckpointError(f"{directory} does not fit this run: --lora-adapters was {then}, is {now}")


def save_adapter(
    directory: Path,
    model: Decoder,
    lora: LoraSettings,
    checkpoint: str,
    whole: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the adapter into `directory`.

    Args:
        directory: Created if missing.
        model: Model with the adapter.
        lora: Rank and alpha.
        checkpoint: Checkpoint of the base.
        whole: The adapter's tensors, for a model that holds shards of them.
    """
    modules = [name for name, _ in model.named_modules()]
    write_adapter(directory, lora, adapter_weights(model) if whole is None else whole, modules, checkpoint)


def load_adapter(directory: Path, model: Decoder, lora: LoraSettings, checkpoint: str) -> None:
    """Restore the adapters, bit for bit.

    Raises:
        CheckpointError: The directory has no adapters, or they do not match `lora` or the base `checkpoint`.
    """
    if not (directory / FOLDER).is_dir():
        raise CheckpointError(
            f"{directory}: no adapters in it (no {FOLDER}/), as it was trained without --lora-rank; to train adapters"
            " on its weights, name it as --hf-checkpoint"
        )
    adapters = adapter_weights(model)
    read_adapter(directory / FOLDER, lora, adapters)
    check_base(directory, merged_weights(model), model, checkpoint)


def check_base(directory: Path, weights: Iterable[tuple[str, torch.Tensor]], model: Decoder, checkpoint: str) -> None:
    """Raise CheckpointError unless the merged parameters `weights` are those that the directory stores."""
    stored, adapters = WeightFiles(directory), adapter_weights(model)
    for parameter, whole in weights:
        adapted = f"{module_of(parameter)}.{UP}" in adapters
        for name, tensor in in_files([(parameter, whole)], model.places):
            if name not in stored.shapes or not same_weight(stored.read(name), tensor, adapted=adapted):
                raise CheckpointError(
                    f"{directory}: its adapters were trained on other weights than --hf-checkpoint {checkpoint}:"
                    f" merged, {name} is not what is stored; name the checkpoint they started from"
                )
