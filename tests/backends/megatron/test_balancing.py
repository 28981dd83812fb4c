"""Losses and bias moves of routers do not depend on the layout, and idle micro-batches have no part in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.megatron import trainer_jobs as jobs
from tests.backends.megatron.ranks import RankPool
from tests.megatron_models import save_deepseek

pytestmark = pytest.mark.backends

Ranks = Callable[[int], RankPool]
BALANCED = {
    "moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 0.05,
    "moe_router_bias_update_rate": 0.05, "data_pad_size_multiplier": 16,
}  # fmt: skip
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2, CP2, EP2 = ({f"{kind}_parallel_size": 2} for kind in ("pipeline_model", "context", "expert_model"))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2+SP x EP2": (2, TP2 | EP2 | {"expert_tensor_parallel_size": 1}),
    "PP2": (2, PP2 | {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    "CP2": (2, CP2),
    "CP2 x TP2+SP": (4, CP2 | TP2),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "deepseek-v3"
    save_deepseek(directory)
    return directory


@pytest.fixture(scope="module")
def expected(ranks: Ranks, checkpoint: Path) -> dict[str, Any]:
    (one,) = ranks(1).run(f"{jobs.__name__}:megatron", model=str(checkpoint), **BALANCED)
    (plain,) = ranks(1).run(f"{jobs.__name__}:megatron", model=str(checkpoint))
    assert one["metrics"][0]["grad_norm"] != pytest.approx(plain["metrics"][0]["grad_norm"], rel=1e-2)
    result: dict[str, Any] = one
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ranks: Ranks, checkpoint: Path, expected: dict[str, Any], layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    results = ranks(world_size).run(f"{jobs.__name__}:megatron", model=str(checkpoint), **BALANCED, **flags)
    jobs.compare(results, expected, 1e-3)


def test_a_rank_with_fewer_micro_batches(ranks: Ranks, checkpoint: Path) -> None:
    """Rank 0 has idle ones, for the sake of the experts that it holds for rank 1."""
    results = ranks(2).run(f"{jobs.__name__}:megatron", model=str(checkpoint), uneven=True, **BALANCED, **EP2)
    for result in results:
        for metrics in result["metrics"]:
            assert all(math.isfinite(value) for value in metrics.values())
            assert metrics["skipped_steps"] == 0
            assert 0.9 < metrics["router_seq_load_balancing_loss"] < 4
