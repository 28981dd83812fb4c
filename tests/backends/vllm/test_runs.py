"""Whole runs with vLLM, as a user types them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backends.whole_runs import running, samples
from tests.conftest import SLIME, TinyRun
from tests.run_files import metrics

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1800)]

ROLLOUTS = 3


def train(tiny: TinyRun, folder: Path, **flags: Any) -> Path:
    """Train; each update compares what is served with what was trained. Return the run directory."""
    save, template = folder / "run", folder / "samples" / "{rollout_id}.jsonl"
    argv = tiny.argv(
        save, num_rollout=ROLLOUTS, eval_interval=None, eval_prompt_data=None, rollout_engine="vllm", device="cpu",
        check_weight_update_equal=True, save_debug_rollout_data=template, **flags,
    )  # fmt: skip
    with running([SLIME, "train", *argv], folder, folder / "log") as started:
        started.finish()
        assert started.left() == []
    lines = [line for line in metrics(save) if "train/loss" in line]
    assert len(lines) == ROLLOUTS
    for line in lines:
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert line["rollout/failed_ratio"] == line["rollout/staleness"] == 0
        assert line["engine/ready_workers"] == 1
    for rollout in range(ROLLOUTS):
        versions = {version for s in samples(template, rollout) for version in s["token_weight_versions"]}
        assert versions == {rollout + 1}
    return save


def test_a_run_trains_on_a_server_that_runs_already(tiny: TinyRun, vllm_server: str, tmp_path: Path) -> None:
    """By broadcast, as the run did not launch the server."""
    save = train(tiny, tmp_path, rollout_external_engine_addrs=vllm_server)
    assert not (save / "engines").exists()


def test_a_run_trains_on_a_server_of_its_own(tiny: TinyRun, vllm_python: Path, tmp_path: Path) -> None:
    save = train(tiny, tmp_path, engine_python=vllm_python, engine_start_timeout=900)
    assert "POST /inference/v1/generate" in (save / "engines/default/0.log").read_text()
