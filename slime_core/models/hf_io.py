"""HF-layout directories on disk: weights in safetensors (single file or indexed shards), config, tokenizer files.

Readers and writers of checkpoints and the disk weight transport call this module; it does not depend on model code.
Tied embeddings are stored once, as HF does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_core.errors import CheckpointError, ConfigError
from slime_core.files import replace_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Default size limit of a weight file in bytes, the same as in transformers."""
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_ASSETS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json", "tokenizer.model",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def weight_files(directory: str | Path) -> list[Path]:
    """Return the safetensors files of the directory, in index order. Raises ConfigError if a file is missing."""
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
    """Yield HF names and tensors, one at a time, in the stored dtype. Raises ConfigError if a file cannot be read."""
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in file.keys():  # noqa: SIM118 -- safe_open is no mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file. Raises CheckpointError if the file cannot be read or has no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def write_weights(
    directory: str | Path, weights: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors in HF's layout: one `model.safetensors`, or shards with an index, complete or not at all.

    Args:
        directory: Created if missing; a model in it is replaced.
        weights: HF names and tensors, read once and in order. At most one shard of them is in memory.
        shard_bytes: Largest size of a file, unless a single tensor is larger.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    partials: list[Path] = []
    names: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        partials.append(directory / f".{WEIGHTS}.partial-{len(partials):05d}")
        names.append(list(held))
        save_file(held, partials[-1], metadata={"format": "pt"})
        held.clear()

    for name, tensor in weights:
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > shard_bytes:
            flush()
            size = 0
        held[name] = tensor.detach().to("cpu").contiguous()
        size, total = size + nbytes, total + nbytes
    flush()
    _publish(directory, partials, names, total)


def _publish(directory: Path, partials: list[Path], names: list[list[str]], total: int) -> None:
    """Rename the files to their final names; the file that readers open first comes last."""
    files = [WEIGHTS]
    if len(partials) > 1:
        files = [f"model-{number:05d}-of-{len(partials):05d}.safetensors" for number in range(1, len(partials) + 1)]
        (directory / INDEX).unlink(missing_ok=True)  # after a kill, it would name shards of two models
    for partial, file in zip(partials, files, strict=True):
        os.replace(partial, directory / file)
    if len(files) > 1:
        weight_map = {name: file for file, held in zip(files, names, strict=True) for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_file(directory / INDEX, f"{json.dumps(index, indent=2)}\n".encode())
    else:
        (directory / INDEX).unlink(missing_ok=True)
    for path in directory.glob("model*.safetensors"):
        if path.name not in files and (path.name == WEIGHTS or _SHARD.fullmatch(path.name)):
            path.unlink()


def copy_assets(source: str | Path, target: str | Path) -> None:
    """Copy config and tokenizer files: all known files of an HF directory except the weights."""
    source, target = Path(source), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    if source.resolve() == target.resolve():
        return
    for name in _ASSETS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_config(directory: str | Path, hf: Mapping[str, object]) -> None:
    """Write `config.json`."""
    path = Path(directory) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(hf), indent=2) + "\n", encoding="utf-8")
