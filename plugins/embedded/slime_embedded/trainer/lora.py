"""LoRA in the embedded trainer: a reference model without a copy of the weights, and checkpoints with adapters.

A checkpoint holds the merged model, for serving and evaluation, and `adapter/` in PEFT's layout. A run resumes from the
adapters and reads the base from `--hf-checkpoint` again. On resume it also reads the merged model, to check that the
adapters were trained on this base.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from slime_core.errors import CheckpointError
from slime_core.models.hf_io import read_weights
from slime_core.models.lora import LoraSettings, module_of, same_weight
from slime_core.models.lora_files import FOLDER, read_adapter, write_adapter
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.lora_linear import UP, LoraLinear, adapter_weights, merged_weights


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


def save_adapter(directory: Path, model: Decoder, lora: LoraSettings, checkpoint: str) -> None:
    """Write `directory/adapter`; `checkpoint` is the checkpoint of the base."""
    modules = [name for name, _ in model.named_modules()]
    write_adapter(directory / FOLDER, lora, adapter_weights(model), modules, checkpoint)


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
    stored = dict(read_weights(directory))
    for name, tensor in merged_weights(model):
        there, adapted = stored.get(name), f"{module_of(name)}.{UP}" in adapters
        if there is None or not same_weight(there, tensor, adapted=adapted):
            raise CheckpointError(
                f"{directory}: its adapters were trained on other weights than --hf-checkpoint {checkpoint}: merged,"
                f" {name} is not what is stored; name the checkpoint they started from"
            )
