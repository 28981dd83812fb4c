"""The adaptive KL controller over two trainer processes, each of which moves the coefficient by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Slime, TinyRun
from tests.run_files import timeless


@pytest.mark.slow
def test_a_resumed_run_is_the_run(tiny: TinyRun, tmp_path: Path, slime_ranks: Slime) -> None:
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.1, "set": "plugins.adaptive_kl.target=1e-4", "lr": "1e-2",
             "num_rollout": 3, "actor_num_gpus_per_node": 2, "device": "cpu", "eval_interval": None,
             "eval_prompt_data": None}  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    slime_ranks("train", *tiny.argv(whole, **flags), timeout=600)
    slime_ranks("train", *tiny.argv(parts, **{**flags, "num_rollout": 1}), timeout=600)
    slime_ranks("train", *tiny.argv(parts, **flags, load=parts), timeout=600)
    assert timeless(parts) == timeless(whole)
    coefficients = [line.get("rollout/kl_coefficient") for line in timeless(whole)]
    assert coefficients[0] is None
    assert 0.1 != coefficients[1] != coefficients[2]
