"""A GGUF file -> a model directory in Hugging Face layout, by transformers' reader, for `slime models import`.

Quantized weights are dequantized. What was written is loaded by slime's own decoder and its logits are compared with
those of transformers before the directory gets its name.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from slime_runs.new_directory import check_new, new_directory

from slime_core.distributions import BUNDLE
from slime_core.errors import ConfigError

_MAGIC = b"GGUF"
_TOKENS = 48
_LIMIT = 1e-4
"""Largest difference of logits in float32, as a share of the largest logit."""


def import_gguf(path: Path, target: Path, dtype: str) -> str:
    """Write the directory, and return a line about it.

    Raises:
        ConfigError: There is no such file, it is not GGUF, transformers does not read it, or the directory is in use.
    """
    _check(path, target)
    check_installed()
    with new_directory(target) as partial:
        model = _convert(path, partial, dtype)
        said = _compared(model, partial, path)
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{path} -> {target}: {model.config.model_type}, {count:,} parameters in {dtype}; {said}"


def check_installed() -> None:
    """Raise ConfigError if the package `gguf`, which transformers' reader needs, is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"reading GGUF files needs the package gguf; type: pip install '{BUNDLE}[gguf]'")


def _check(path: Path, target: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"slime models import {path}: no such file")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"slime models import {path}: not a GGUF file (it does not begin with {_MAGIC.decode()})")
    check_new(target, f"slime models import: {target}")


def _convert(path: Path, folder: Path, dtype: str) -> Any:
    """Write model and tokenizer; return the model of transformers."""
    import torch
    import transformers

    read = {"gguf_file": path.name, "local_files_only": True}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=getattr(torch, dtype), **read)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), **read)
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"slime models import {path}: transformers cannot read it: {told}") from error
    # The weights are dequantized by now; save_pretrained still takes them for quantized ones and refuses.
    model.hf_quantizer, model.is_quantized = None, False  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = ""
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    model.train(False)
    return model


def _compared(model: Any, folder: Path, path: Path) -> str:
    """Return the largest difference of logits to slime's decoder. Raises ConfigError if it is not the same model."""
    import torch
    from slime_embedded.models.decoder import Decoder

    from slime_core.errors import PluginNotFoundError
    from slime_core.models.config import load_model_config
    from slime_core.models.hf_io import read_weights

    try:
        config = load_model_config(str(folder))
    except (ConfigError, PluginNotFoundError) as error:
        return f"not compared, since the embedded trainer does not read it: {error}"
    ids = torch.randint(config.vocab_size, (_TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.nn.Module.float(model)(ids[None]).logits[0]
        found = Decoder.from_weights(config, read_weights(folder), origin=str(folder))(ids, [len(ids)])
    apart, allowed = (found - expected).abs().max().item(), _LIMIT * max(expected.abs().max().item(), 1.0)
    if not apart <= allowed:
        raise ConfigError(
            f"slime models import {path}: slime's model of it differs from transformers' (largest difference of logits"
            f" {apart:.3g}, at most {allowed:.3g}), so nothing is written"
        )
    return f"largest difference of logits between slime and transformers {apart:.3g}, at most {allowed:.3g}"
