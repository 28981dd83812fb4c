"""Adapters on disk in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

The trainers write them into a checkpoint's `adapter/` and read them back on resume. `PeftModel.from_pretrained` loads
the directory unchanged onto the base model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime_core.errors import CheckpointError
from slime_core.models.hf_io import read_into, read_json
from slime_core.models.lora import LoraSettings

FOLDER = "adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_adapter(
    directory: Path, lora: LoraSettings, tensors: Mapping[str, torch.Tensor], modules: Iterable[str], base: str
) -> None:
    """Write both files.

    Args:
        directory: Created if missing.
        lora: Rank and alpha.
        tensors: float32 under `MODULE.lora_A` [rank, in] and `MODULE.lora_B` [out, rank].
        modules: Names of all modules of the model. `target_modules` lists the last parts of the adapted names if no
            other module has the same last part, else the whole names.
        base: The base model's directory or hub name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    adapted = {name.rpartition(".")[0] for name in tensors}
    words = {name.rpartition(".")[2] for name in adapted}
    unique = all(name in adapted for name in modules if name.rpartition(".")[2] in words)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(words if unique else adapted),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {f"{_PREFIX}{name}.weight": tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(stored, directory / WEIGHTS, metadata={"format": "pt"})


def read_adapter(directory: Path, lora: LoraSettings, into: Mapping[str, torch.Tensor]) -> None:
    """Copy the stored adapters into `into`; names and shapes must match, and nothing is copied unless all do.

    Raises:
        CheckpointError: The adapters are missing, of other modules, or of another rank or alpha.
    """
    config = read_json(directory / CONFIG)
    pairs = (("--lora-rank", config.get("r"), lora.rank), ("--lora-alpha", config.get("lora_alpha"), lora.alpha))
    if problems := [f"{flag} was {then}, is {now}" for flag, then, now in pairs if then != now]:
        raise CheckpointError(f"{directory} does not fit this run: {', '.join(problems)}")
    read_into([directory / WEIGHTS], into, lambda stored: stored.removeprefix(_PREFIX).removesuffix(".weight"))
