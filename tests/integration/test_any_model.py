"""`slime train` of a family that only transformers has: trained, resumed bit for bit, and exported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slime_testing_contracts.families import write_family

from tests.conftest import TinyRun

SLIME = str(Path(sys.executable).with_name("slime"))
GAP = "train/train_rollout_logprob_abs_diff"


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith(("train/", "rollout/"))} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "lfm2"])
def test_a_run_resumes_bit_for_bit_and_is_exported(name: str, tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", name)
    flags = {"hf_checkpoint": model, "check_weight_update_equal": True, "kl_loss_coef": 0.1, "use_kl_loss": True}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    said = slime("train", *tiny.argv(whole, num_rollout=3, **flags)).stderr
    assert ("packed or" in said) == (name == "gemma3_text")
    assert "of transformers, sdpa attention: samples go" in said
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


@pytest.mark.slow
def test_shards_on_two_ranks_train_as_a_whole_model(tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    flags = {"num_rollout": 2, "device": "cpu", "check_weight_update_equal": True, "eval_prompt_data": None}
    slime("train", *tiny.argv(whole, train_backend="embedded", eval_interval=None, **flags))
    ranks = {"train_backend": "fsdp", "actor_num_gpus_per_node": 2, "eval_interval": None}
    run = partial(subprocess.run, check=True, timeout=240)
    run([SLIME, "train", *tiny.argv(shards, **flags, **ranks)])
    for row, other in zip(metrics(whole), metrics(shards), strict=True):
        assert row.keys() == other.keys()
        for name in ("train/loss", "train/grad_norm", "rollout/reward_mean"):
            if name in row:
                assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), name
    run([SLIME, "train", *tiny.argv(shards, load=shards, **flags | {"num_rollout": 3}, **ranks)])
    assert (shards / "checkpoints/rollout_0000002/trainer/shards").is_dir()
