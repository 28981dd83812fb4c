"""Routing replay does not depend on the layout: every rank replays and records what one process does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.megatron import routing_jobs as jobs
from tests.backends.megatron import trainer_jobs
from tests.backends.megatron.ranks import RankPool
from tests.conftest import Slime, TinyRun
from tests.megatron_models import save_tiny

pytestmark = pytest.mark.backends

Ranks = Callable[[int], RankPool]
LAYERS = [1, 3]
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
PP2, CP2, EP2 = ({f"{kind}_parallel_size": 2} for kind in ("pipeline_model", "context", "expert_model"))
FULL = {"recompute_granularity": "full"}
EXPERTS_ONLY = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2+SP": (2, {**TP2, "expert_tensor_parallel_size": 2}),
    "TP2+SP, whole experts": (2, TP2),
    "EP2": (2, EP2),
    "PP2, recomputed": (2, PP2 | FULL),
    "PP2, experts recomputed": (2, PP2 | EXPERTS_ONLY),
    "VPP2": (2, PP2 | {"num_layers_per_virtual_pipeline_stage": 1}),
    "CP2, padded": (2, CP2 | {"data_pad_size_multiplier": 16}),
    "TP2+SP x EP2 x PP2": (4, TP2 | EP2 | PP2),
    "CP2 x TP2+SP": (4, CP2 | TP2),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "qwen3-moe"
    save_tiny(directory, "qwen3-moe-mixed", vocab_size=trainer_jobs.VOCABULARY)
    return directory


@pytest.fixture(scope="module")
def expected(ranks: Ranks, checkpoint: Path) -> dict[str, Any]:
    (one,) = ranks(1).run(f"{jobs.__name__}:megatron", model=str(checkpoint), layers=LAYERS)
    jobs.compare([one], jobs.embedded(checkpoint, LAYERS), LAYERS)
    result: dict[str, Any] = one
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ranks: Ranks, checkpoint: Path, expected: dict[str, Any], layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    results = ranks(world_size).run(f"{jobs.__name__}:megatron", model=str(checkpoint), layers=LAYERS, **flags)
    assert all(0.3 < metrics["routing_mismatch"] < 1 for metrics in expected["metrics"])
    jobs.compare(results, expected, LAYERS, whole=True)


@pytest.mark.timeout(300)
def test_a_run_replays_the_engines_experts(slime_ranks: Slime, tiny_moe: TinyRun, tmp_path: Path) -> None:
    """R3 with the embedded engine, experts over two processes: the embedded trainer's run."""
    flags = {"use_rollout_routing_replay": True, "num_rollout": 1, "eval_interval": None, "eval_prompt_data": None}
    spread = {"train_backend": "megatron", "device": "cpu", "actor_num_gpus_per_node": 2, "data_pad_size_multiplier": 1}
    found = []
    for name, more in (("embedded", {}), ("megatron", {**spread, **EP2})):
        slime_ranks("train", *tiny_moe.argv(tmp_path / name, **flags, **more), timeout=200)
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found += [row for row in rows if "train/loss" in row]
    embedded, megatron = found
    assert megatron["rollout/routing_replay_fraction"] == 1.0
    assert megatron["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    for metric in ("train/loss", "train/grad_norm", "rollout/response_lengths"):
        assert megatron[metric] == pytest.approx(embedded[metric], rel=2e-3), metric
    # The embedded trainer leaves out the prompts' rows in the last layer.
    assert megatron["train/routing_mismatch"] == pytest.approx(embedded["train/routing_mismatch"], abs=0.05)
