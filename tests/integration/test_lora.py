"""Whole runs with `--lora-rank`: served merged, learned, resumed, and refused where nobody could train them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slime_testing_contracts.loop import LoopRun

from tests.conftest import TinyRun

Slime = Callable[..., subprocess.CompletedProcess[str]]
LORA: dict[str, Any] = {"lora_rank": 8, "lora_alpha": 16.0, "use_kl_loss": True, "kl_loss_coef": 0.01}
GAP = "train/train_rollout_logprob_abs_diff_max"


def rows(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


@pytest.mark.slow
def test_engines_serve_the_merged_weights_bit_for_bit(slime: Slime, tiny: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    slime("train", *tiny.argv(run, **LORA, true_on_policy_mode=True, check_weight_update_equal=True))
    assert [row[GAP] for row in rows(run) if GAP in row] == [0.0] * 4
    kl = [row["train/kl_loss"] for row in rows(run) if "train/kl_loss" in row]
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": 8.0}, "--lora-alpha 8.0 (flag): without --lora-rank N there are no adapters"),
        ({"lora_rank": 4, "lora_dropout": 0.1}, "--lora-dropout 0.1 (flag)"),
        ({"lora_rank": 4, "lora_target_modules": ["qproj"]}, "--lora-target-modules qproj: no such module"),
        ({"lora_rank": 0}, "--lora-rank"),
    ],
)
def test_what_makes_no_sense_is_refused(
    change: dict[str, object], message: str, slime: Slime, tiny: TinyRun, tmp_path: Path
) -> None:
    done = slime("train", *tiny.argv(tmp_path / "run", **change), check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_a_trainer_that_has_no_adapters_refuses_them(slime: Slime, tiny: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "from tests.toy_trainer import ToyTrainer\n\nclass Other(ToyTrainer):\n    pass\n"
    )
    argv = tiny.argv(tmp_path / "run", lora_rank=4, train_backend=f"{tmp_path}/other.py:Other")
    done = slime("train", *argv, check=False)
    assert done.returncode == 2, done.stderr
    assert "--lora-rank 4 (flag) has no effect with" in done.stderr
