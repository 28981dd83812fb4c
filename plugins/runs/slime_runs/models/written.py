"""Write the model of a commit for other programs, and prove that it is the trainer's.

Files are written beside their target, loaded by transformers, and compared: the logits of what was written against
those of the trainer's model. Over the limit nothing is left behind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from slime_embedded.models.lora import CONFIG
from slime_embedded.models.lora import WEIGHTS as ADAPTER

from slime_core.distributions import BUNDLE
from slime_core.errors import ConfigError, SlimeError
from slime_core.models.hf_io import copy_assets, read_json, write_config, write_weights
from slime_runs.models.commit import Commit, logits_of
from slime_runs.new_directory import check_new, new_directory
from slime_runs.save_hf import copy_model

GGUF = "model.gguf"
_LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Largest difference of logits by the dtype of the files, as a share of the largest logit."""


class ExportError(SlimeError):
    """The files that were written do not hold the trainer's model."""


@dataclass(frozen=True)
class Proof:
    """The comparison of the files with the trainer's model."""

    difference: float
    """Largest difference between two logits."""
    limit: float
    largest: float
    """Largest logit of the trainer."""
    sequences: int
    tokens: int
    notes: tuple[str, ...] = ()
    """Parts that the comparison does not cover."""

    def __str__(self) -> str:
        text = (
            f"largest difference of logits {self.difference:.3g}, at most {self.limit:.3g} (largest logit"
            f" {self.largest:.3g}; {self.sequences} sequences, {self.tokens} tokens; read by transformers)"
        )
        return "; ".join((text, *self.notes))


@dataclass(frozen=True)
class _Written:
    """The files that were written, loaded by transformers in float32."""

    model: Any
    dtype: torch.dtype
    """Dtype of the weights in the files."""
    notes: tuple[str, ...] = ()


def write_model(
    commit: Commit, target: Path, form: str, *, dtype: str | None = None, limit: float | None = None
) -> Proof:
    """Write the model into a new directory and return the proof.

    Args:
        commit: The model.
        target: Directory that does not exist, or is empty.
        form: "merged", "peft" or "gguf".
        dtype: Dtype of the weights; by default the commit's, float16 for a GGUF file of bfloat16 weights.
        limit: Largest difference of logits; by default a share of the largest logit that depends on the dtype.

    Raises:
        ConfigError: The directory is in use, or the format cannot hold this model.
        ExportError: The logits differ by more; nothing is left in the directory.
    """
    check_new(target, f"-o {target}:")
    if form == "peft" and (commit.adapter is None or dtype is not None):
        why = "the run trained no adapters (--lora-rank)" if commit.adapter is None else "adapters stay float32"
        raise ConfigError(f"--format peft: {why}; type --format merged")
    if form == "gguf" and dtype == "bfloat16":
        raise ConfigError("--dtype bfloat16: GGUF files are written in float32 or float16")
    with new_directory(target) as partial:
        writers = {
            "merged": lambda: _merged(commit, partial, dtype),
            "peft": lambda: _peft(commit, partial),
            "gguf": lambda: _gguf(commit, partial, dtype),
        }
        proof = _compare(commit, writers[form](), limit)
        if not proof.difference <= proof.limit:
            raise ExportError(f"--format {form}: {proof}: not the trainer's model, so nothing is written")
    return proof


def _compare(commit: Commit, written: _Written, limit: float | None) -> Proof:
    found, expected = logits_of(written.model, commit.token_ids), commit.logits
    apart = [torch.nan_to_num((a - b).abs(), nan=torch.inf).max().item() for a, b in zip(found, expected)]
    largest = max(b.abs().max().item() for b in expected)
    allowed = limit if limit is not None else _LIMITS[written.dtype] * max(largest, 1.0)
    return Proof(max(apart), allowed, largest, len(expected), sum(map(len, expected)), written.notes)


def _load(folder: Path, **more: Any) -> Any:
    """Load a model by transformers, in float32."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True, trust_remote_code=False, **more
    )
    return model.eval()


def _stored_dtype(commit: Commit) -> torch.dtype:
    hf = commit.config.hf
    found: torch.dtype = getattr(torch, str(hf.get("dtype") or hf.get("torch_dtype") or "float32"))
    return found


def _merged(commit: Commit, folder: Path, dtype: str | None) -> _Written:
    """Write a directory in Hugging Face layout: the commit's own files, or the trainer's weights, adapters merged."""
    stored = _stored_dtype(commit)
    wanted = stored if dtype is None else getattr(torch, dtype)
    if wanted == stored and commit.name is None:
        copy_model(commit.path, folder)
    else:
        copy_assets(commit.path, folder)
        hf = {key: value for key, value in commit.config.hf.items() if key != "torch_dtype"}
        write_config(folder, {**hf, "dtype": str(wanted).removeprefix("torch.")})
        write_weights(folder, ((name, tensor.to(wanted)) for name, tensor in commit.weights()))
    return _Written(_load(folder), wanted)


def _peft(commit: Commit, folder: Path) -> _Written:
    """Write the adapters with the tokenizer; the configuration names the base as the run's settings do."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError("--format peft: the proof loads the adapters by peft: pip install peft") from error
    assert commit.adapter is not None
    copy_assets(commit.path, folder)
    (folder / "config.json").unlink()
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copyfile(commit.adapter / ADAPTER, folder / ADAPTER)
    config = read_json(commit.adapter / CONFIG)
    (folder / CONFIG).write_text(json.dumps({**config, **_named_base(commit)}, indent=2) + "\n", encoding="utf-8")
    model: Any = PeftModel.from_pretrained(_load(commit.base), str(folder), local_files_only=True)
    return _Written(model.eval(), torch.float32)


def _named_base(commit: Commit) -> Mapping[str, str]:
    """Return the name and commit on the hub of the adapters' base; empty if the run's model is a directory."""
    name = str(commit.settings.get("hf_checkpoint"))
    if not name.startswith("hf:"):
        return {}
    repo, _, revision = name.removeprefix("hf:").partition("@")
    return {"base_model_name_or_path": repo, "revision": revision}


def _gguf(commit: Commit, folder: Path, dtype: str | None) -> _Written:
    """Write a GGUF file with the tokenizer, and load it by transformers' reader."""
    try:
        from slime_runs.models import gguf_file
    except ImportError as error:
        raise ConfigError(f"--format gguf needs gguf: pip install '{BUNDLE}[hub]'") from error
    default = torch.float16 if _stored_dtype(commit) == torch.bfloat16 else _stored_dtype(commit)
    wanted = default if dtype is None else getattr(torch, dtype)
    notes = gguf_file.write(folder / GGUF, commit, wanted)
    model = _load(folder, gguf_file=GGUF, config=gguf_file.config_of(folder / GGUF, commit))
    return _Written(model, wanted, notes)
