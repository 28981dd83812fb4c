"""Write a GGUF file's model as a directory in Hugging Face layout, for `--hf-checkpoint`.

transformers reads the file (https://huggingface.co/docs/transformers/gguf), with the package `gguf`. Quantised weights
become float32, so the model is the one that the file holds, and not bit for bit the one that was quantised.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from slime_core.errors import ConfigError


def import_gguf(file: Path, target: Path) -> int:
    """Write float32 weights, configuration, tokenizer and chat template; `target` appears whole or not at all.

    Args:
        file: The GGUF file.
        target: A directory that is missing or empty.

    Returns:
        The number of parameters.

    Raises:
        ConfigError: The file cannot be read, something is at `target`, or the package `gguf` is missing.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; name a GGUF file")
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise ConfigError(f"{target} is there already: name a new or empty directory")
    check_installed()
    partial = target.with_name(f".{target.name}.importing")
    if partial.exists():  # left by an import that was killed
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        parameters = _convert(file, partial)
        os.rename(partial, target)  # an empty directory is replaced
    except BaseException:
        shutil.rmtree(partial)
        raise
    return parameters


def check_installed() -> None:
    """Raise ConfigError if the package `gguf` is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("reading GGUF files needs the package gguf; type: pip install 'slime-rl[gguf]'")


def _convert(file: Path, target: Path) -> int:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        if getattr(model.config, "quantization_config", None) is not None:
            # The weights are dequantised, but save_pretrained refuses a model that says that it was quantised.
            model.hf_quantizer, model.is_quantized = None, False
            del model.config.quantization_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    except Exception as error:
        raise ConfigError(f"{file}: transformers cannot read it as GGUF: {type(error).__name__}: {error}") from error
    finally:
        if shows:
            logging.enable_progress_bar()
    return sum(parameter.numel() for parameter in model.parameters())
