"""Adapters on disk as PEFT has them: `adapter_config.json` and `adapter_model.safetensors`.

Written into a checkpoint's `adapter/` by the trainers, and read back on resume. `PeftModel.from_pretrained` loads the
directory onto the base model as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_core.errors import CheckpointError
from slime_core.models.lora import LoraSettings

FOLDER = "adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_adapter(
    directory: Path, lora: LoraSettings, tensors: Mapping[str, torch.Tensor], modules: Iterable[str], base: str
) -> None:
    """Write both files.

    Args:
        directory: Made when it is not there.
        lora: Rank and alpha.
        tensors: float32 under `MODULE.lora_A` [rank, in] and `MODULE.lora_B` [out, rank].
        modules: Names of all modules of the model; PEFT is told the last parts of the adapted ones where no other
            module ends so, else their whole names.
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
    """Copy the stored adapters into `into`, whose names and shapes they must have; nothing is copied unless all fit.

    Raises:
        CheckpointError: No adapters there, of other modules, or with another rank or alpha; all differences are listed.
    """
    config = _read_config(directory)
    try:
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            names = list(file.keys())
            shapes = {_own_name(name): tuple(file.get_slice(name).get_shape()) for name in names}
            _check(directory, lora, config, shapes, {name: tuple(t.shape) for name, t in into.items()})
            with torch.no_grad():
                for name in names:
                    into[_own_name(name)].copy_(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory / WEIGHTS}: cannot be read: {error}") from error


def _own_name(stored: str) -> str:
    return stored.removeprefix(_PREFIX).removesuffix(".weight")


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / CONFIG}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{directory / CONFIG}: not a JSON object")
    return config


def _check(
    directory: Path,
    lora: LoraSettings,
    config: Mapping[str, Any],
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
) -> None:
    pairs = (("--lora-rank", config.get("r"), lora.rank), ("--lora-alpha", config.get("lora_alpha"), lora.alpha))
    problems = [f"{flag} was {then}, is {now}" for flag, then, now in pairs if then != now]
    problems += [f"no adapter of {name}" for name in wanted if name not in found]
    problems += [f"an adapter of {name}, which this run does not adapt" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {list(found[name])}, this run {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if problems:
        shown = problems[:20] + ([f"... {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise CheckpointError(f"{directory} does not fit this run:\n  " + "\n  ".join(shown))
