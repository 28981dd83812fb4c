"""`--use-sampling-mask`: whole runs that sample from a part of the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyRun
from tests.run_files import trained

FLAGS: dict[str, Any] = {
    "use_sampling_mask": True, "rollout_top_p": 0.9, "rollout_top_k": 20, "eval_interval": None,
    "eval_prompt_data": None,
}  # fmt: skip


def test_engine_and_trainer_agree_over_what_was_sampled_among(slime, tiny: TinyRun, tmp_path: Path) -> None:
    """The same settings without the mask are far apart: it is not that nothing was cut."""
    slime("train", *tiny.argv(tmp_path / "run", **FLAGS, num_rollout=2))
    assert [row["train/train_rollout_logprob_abs_diff_max"] < 1e-5 for row in trained(tmp_path / "run")] == [True] * 2
    vocab = json.loads((tiny.root / "model/config.json").read_text())["vocab_size"]
    sizes = [row["rollout/sampled_among"] for row in trained(tmp_path / "run")]
    assert all(1 <= size <= 20 for size in sizes)
    assert [row["rollout/sampled_among_share"] for row in trained(tmp_path / "run")] == [size / vocab for size in sizes]


@pytest.mark.slow
def test_bit_for_bit_with_true_on_policy_mode(slime, tiny: TinyRun, tmp_path: Path) -> None:
    slime("train", *tiny.argv(tmp_path / "run", **FLAGS, num_rollout=1, true_on_policy_mode=True))
    assert [row["train/train_rollout_logprob_abs_diff_max"] for row in trained(tmp_path / "run")] == [0.0]
