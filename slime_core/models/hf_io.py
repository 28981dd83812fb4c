"""HF-layout directories on disk: weights in safetensors (single file or indexed shards), config, tokenizer files.

Readers and writers of checkpoints and of the disk weight transport call this; nothing here knows a module.
Tied embeddings are stored once, as HF does.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_core.errors import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_ASSETS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json", "tokenizer.model",
    "preprocessor_config.json",
)  # fmt: skip


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of the directory, in index order. Raises ConfigError when there are none."""
    directory = Path(directory)
    if (directory / INDEX).is_file():
        try:
            names = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{directory / INDEX}: no index with a weight_map ({error})") from error
        files = [directory / name for name in dict.fromkeys(names)]
    else:
        files = [directory / WEIGHTS]
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise ConfigError(f"{directory}: no weights ({', '.join(missing)} missing); slime reads safetensors only")
    return files


def read_weights(directory: str | Path, device: str | torch.device = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """HF names and tensors, one at a time, in the stored dtype. Raises ConfigError when a file cannot be read."""
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in file.keys():  # noqa: SIM118 -- safe_open is no mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from error


def write_weights(directory: str | Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write all tensors to one `model.safetensors`, complete or not at all."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
    partial = directory / f".{WEIGHTS}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, directory / WEIGHTS)


def copy_assets(source: str | Path, target: str | Path) -> None:
    """Copy config and tokenizer files, everything of an HF directory but the weights."""
    source, target = Path(source), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    if source.resolve() == target.resolve():
        return
    for name in _ASSETS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_config(directory: str | Path, hf: Mapping[str, Any]) -> None:
    """Write `config.json`."""
    path = Path(directory) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(hf), indent=2) + "\n", encoding="utf-8")
