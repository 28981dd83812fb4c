"""`slime convert` as it is typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyRun


@pytest.mark.slow
def test_there_and_back(tiny: TinyRun, tmp_path: Path, slime: Any) -> None:
    hf, megatron, back = tiny.root / "model", tmp_path / "megatron", tmp_path / "back"
    done = slime("convert", "hf-to-megatron", "--hf-checkpoint", hf, "--save", megatron)
    assert f"{megatron}: " in done.stdout
    assert "in Megatron's format, float32, from a model in HF format" in done.stdout
    assert json.loads((megatron / "megatron.json").read_text())["format"] == 1
    flags = ("--load", megatron, "--save", back)
    refused = slime("convert", "megatron-to-hf", *flags, check=False)
    assert refused.returncode == 2
    assert "--hf-checkpoint is required" in refused.stderr
    done = slime("convert", "megatron-to-hf", *flags, "--hf-checkpoint", hf)
    assert "Warning" not in done.stderr
    assert (back / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    assert (back / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    again = slime("convert", "megatron-to-hf", *flags, "--hf-checkpoint", hf, check=False)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    # What such a directory may be in a run.
    train = tiny.argv(tmp_path / "run", use_kl_loss=True, ref_load=megatron)
    done = slime("train", *train, check=False)
    assert done.returncode == 2
    assert "is a model in Megatron format, which --train-backend 'embedded'" in done.stderr
    done = slime("train", *tiny.argv(tmp_path / "run", hf_checkpoint=megatron), check=False)
    assert "which engines cannot read; name the HF model" in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["to-hf"], "unknown action 'to-hf'. Type: slime convert hf-to-megatron or megatron-to-hf"),
        (["hf-to-megatron", "--save", "x"], "--hf-checkpoint is required"),
        (["megatron-to-hf", "--save", "x"], "--load is required"),
        (
            ["hf-to-megatron", "--hf-checkpoint", "x", "--save", "y", "--tensor-model-parallel-size", "2"],
            "torchrun --nproc-per-node 2 -m slime_core convert hf-to-megatron",
        ),
    ],
)
def test_usage(slime: Any, argv: list[str], message: str) -> None:
    done = slime("convert", *argv, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_nothing_to_convert_from(tiny: TinyRun, tmp_path: Path, slime: Any) -> None:
    shutil.copytree(tiny.root / "model", tmp_path / "hf")
    done = slime("convert", "megatron-to-hf", "--load", tmp_path / "hf", "--save", tmp_path / "x", check=False)
    assert "is a model in HF format: there is nothing to convert" in done.stderr
    done = slime("convert", "megatron-to-hf", "--load", tmp_path, "--save", tmp_path / "x", check=False)
    assert f"--load {tmp_path}: no model there. Looked for" in done.stderr
    assert done.returncode == 1
