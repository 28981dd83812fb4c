"""`slime train` of a family that only transformers has: trained, resumed bit for bit, and exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slime_testing_contracts.families import write_family

from tests.conftest import TinyRun

GAP = "train/train_rollout_logprob_abs_diff"


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith(("train/", "rollout/"))} for row in rows]


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_a_run_resumes_bit_for_bit_and_is_exported(name: str, tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", name)
    flags = {"hf_checkpoint": model, "check_weight_update_equal": True, "kl_loss_coef": 0.1, "use_kl_loss": True}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    slime("train", *tiny.argv(whole, num_rollout=3, **flags))
    slime("train", *tiny.argv(halves, num_rollout=2, **flags))
    slime("train", *tiny.argv(halves, num_rollout=3, load=halves, **flags))
    last = "checkpoints/rollout_0000002/model.safetensors"
    found, expected = load_file(halves / last), load_file(whole / last)
    assert found.keys() == expected.keys() == load_file(model / "model.safetensors").keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    rows = metrics(whole)
    assert metrics(halves) == rows
    gaps = [row[GAP] for row in rows if GAP in row]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5
    wrote = json.loads(slime("export", whole, "--format", "merged", "-o", tmp_path / "out", "--json").stdout)["wrote"]
    apart, allowed = map(float, re.search(r"logits (\S+), at most (\S+) ", wrote).groups())  # type: ignore[union-attr]
    assert apart <= allowed < 1e-2
