"""`--use-sampling-mask` with real SGLang: whole runs in which engine and trainer agree, and what is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyRun

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

MEGATRON = {"train_backend": "megatron", "data_pad_size_multiplier": 1}


@pytest.fixture
def argv(tiny: TinyRun, sglang_python: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def make(**flags: Any) -> list[str]:
        ours = {
            "rollout_engine": "sglang", "device": "cpu", "rollout_num_gpus": 1, "engine_python": sglang_python,
            "num_rollout": 2, "use_sampling_mask": True, "rollout_top_p": 0.9,
        }  # fmt: skip
        return tiny.argv(tmp_path / "run", **ours | flags)

    return make


@pytest.mark.parametrize("trainer", [{}, MEGATRON], ids=["embedded", "megatron"])
def test_engine_and_trainer_agree_over_what_was_sampled_among(
    slime: Callable[..., subprocess.CompletedProcess[str]],
    argv: Callable[..., list[str]],
    tmp_path: Path,
    trainer: dict[str, Any],
) -> None:
    """An evaluation that samples otherwise, for which SGLang tells none, is answered without."""
    own = {"eval_interval": 1, "eval_temperature": 1.0, "eval_top_p": 0.7, "eval_top_k": -1}
    done = slime("train", *argv(rollout_top_k=20, **own, **trainer), timeout=400)
    assert "failed" not in done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    assert [row["train/train_rollout_logprob_abs_diff_max"] < 1e-4 for row in trained] == [True] * 2
    assert all(row["rollout/failed_ratio"] == 0 for row in trained)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "for a finite top_k only; type --rollout-top-k 1000 beside --rollout-top-p 0.9"),
        (
            {"rollout_top_k": 5000},
            "at most 4096 ids of a token (--sglang-sampling-mask-max-tokens)",
        ),
        (
            {"rollout_top_k": 9, "rollout_num_gpus": 2, "prefill_num_servers": 1},
            "in front of prefill and decode servers",
        ),
    ],
    ids=["no-top-k", "too-many", "disaggregated"],
)
def test_what_sglang_does_not_return_is_refused_before_the_start(
    slime: Callable[..., subprocess.CompletedProcess[str]],
    argv: Callable[..., list[str]],
    flags: dict[str, Any],
    said: str,
) -> None:
    done = slime("train", *argv(**flags), check=False)
    assert done.returncode == 2
    assert said in done.stderr
