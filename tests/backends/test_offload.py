"""`--offload` with Ray, SGLang and Megatron: the same bits, and what a server on a CPU cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Slime, TinyRun
from tests.run_files import last_commit, metrics, timeless

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]


@pytest.fixture
def train(slime_ranks: Slime) -> Slime:
    """`slime train` with these flags, to its end."""
    return lambda argv, *more: slime_ranks("train", *argv, *more, timeout=600)


@pytest.mark.parametrize("ranks", [1, 2])
def test_under_ray(train: Slime, tiny: TinyRun, cluster: str, tmp_path: Path, ranks: int) -> None:
    flags: dict[str, Any] = {"num_rollout": 2, "device": "cpu", "actor_num_gpus_per_node": ranks}
    flags |= {"train_backend": "embedded", "rollout_engine": "embedded"}
    train(tiny.argv(tmp_path / "inline", **flags))
    done = train(tiny.argv(tmp_path / "ray", **flags, colocate=True), "--ray-address", cluster)
    assert "without effect" not in done.stderr
    assert timeless(tmp_path / "ray") == timeless(tmp_path / "inline")
    assert last_commit(tmp_path / "ray") == last_commit(tmp_path / "inline")
    assert all("perf/offload_time" in line for line in metrics(tmp_path / "ray") if "train/loss" in line)


@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2}], ids=["one", "tensor"])
def test_megatron(train: Slime, tiny: TinyRun, tmp_path: Path, layout: dict[str, Any]) -> None:
    flags: dict[str, Any] = {"num_rollout": 2, "device": "cpu", "train_backend": "megatron", **layout}
    train(tiny.argv(tmp_path / "plain", **flags))
    done = train(tiny.argv(tmp_path / "offloaded", **flags, offload=True))
    assert "keeps its memory" not in done.stderr
    assert timeless(tmp_path / "offloaded") == timeless(tmp_path / "plain")


def test_sglang_on_a_cpu_keeps_its_memory_and_says_so(
    train: Slime, tiny: TinyRun, sglang_python: Path, tmp_path: Path
) -> None:
    """Its servers run without torch_memory_saver, so none is asked; the trainer's part works."""
    flags: dict[str, Any] = {
        "num_rollout": 2, "rollout_engine": "sglang", "device": "cpu", "rollout_num_gpus": 1,
        "engine_python": sglang_python, "no_engine_router": True, "eval_interval": None, "eval_prompt_data": None,
    }  # fmt: skip
    done = train(tiny.argv(tmp_path / "run", **flags, offload=True))
    assert "SGLang frees GPU memory only (torch_memory_saver); servers on a CPU keep theirs" in done.stderr
    lines = metrics(tmp_path / "run")
    assert len(lines) == 2
    for line in lines:
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert line["engine/quarantined"] == 0
    log = next((tmp_path / "run" / "engines").rglob("0.log")).read_text()
    assert "memory_occupation" not in log
