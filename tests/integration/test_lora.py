"""Whole runs with `--lora-rank`: served merged, learned, resumed, and refused where nobody could train them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slime_testing_contracts.loop import LoopRun

from tests.conftest import Slime, TinyRun
from tests.run_files import gaps, metrics

LORA: dict[str, Any] = {"lora_rank": 8, "lora_alpha": 16.0, "use_kl_loss": True, "kl_loss_coef": 0.01}


@pytest.mark.slow
def test_engines_serve_the_merged_weights_bit_for_bit(slime: Slime, tiny: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    slime("train", *tiny.argv(run, **LORA, true_on_policy_mode=True, check_weight_update_equal=True))
    assert gaps(run) == [0.0] * 4
    kl = [row["train/kl_loss"] for row in metrics(run) if "train/kl_loss" in row]
    assert abs(kl[0]) < abs(kl[-1]), "the adapters leave the reference, which is the base"
    checkpoint = run / "checkpoints" / "rollout_0000003"
    base, merged = load_file(tiny.root / "model" / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert {name for name in base if not torch.equal(base[name], merged[name])} == {n for n in base if "proj" in n}
    config = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (8, str(tiny.root / "model"))


def test_it_learns(run_loop: Callable[..., LoopRun]) -> None:
    run = run_loop(12, lr="3e-2", custom_rm_path="slime_testing_contracts.tiny.digits", lora_rank=8)
    rewards = run.metric("rollout/raw_reward")
    assert sum(rewards[:2]) / 2 < 0.1
    assert sum(rewards[-2:]) / 2 > 0.2
