"""What the calls of the Megatron trainer return on every rank; whole algorithms are in `test_parity_layouts.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.megatron import trainer_jobs as jobs
from tests.backends.megatron.ranks import RankPool
from tests.megatron_models import save_tiny

pytestmark = pytest.mark.backends

TP2, PP2, CP2 = ({f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context"))
SP = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "VPP2": (2, PP2 | {"num_layers_per_virtual_pipeline_stage": 1}),
    "TP2+SP x PP2": (4, TP2 | PP2 | SP),
    "CP2 x TP2+SP": (4, CP2 | TP2 | SP),
    "DP2 x PP2": (4, PP2),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "qwen3"
    save_tiny(directory, "qwen3-tied", vocab_size=jobs.VOCABULARY)
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Any]:
    return jobs.embedded(checkpoint)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps(ranks: Callable[[int], RankPool], checkpoint: Path, expected: dict[str, Any], layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    results = ranks(world_size).run(f"{jobs.__name__}:megatron", model=str(checkpoint), **flags)
    compare(results, expected)
    assert results[0]["multiple"] == (2 if "VPP" in layout else 1)


def compare(results: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 2e-4) -> None:
    """Every rank's answers are the embedded trainer's for its share, and the weights are its weights."""
    data_size = max(result["rank"] for result in results) + 1
    for result in results:
        part, _ = jobs.shares(data_size)[result["rank"]]
        for step, wanted in zip(result["metrics"], expected["metrics"], strict=True):
            assert step == pytest.approx(wanted, rel=tolerance, abs=2e-6)
        for name in ("log_probs", "entropy", "after"):
            for found, position in zip(result[name], part, strict=True):
                torch.testing.assert_close(found, expected[name][position], rtol=0, atol=tolerance)
        for found, wanted in zip(result["step_log_probs"], expected["step_log_probs"], strict=True):
            assert set(found) == set(range(len(part)))
            for place, position in enumerate(part):
                torch.testing.assert_close(found[place], wanted[position], rtol=0, atol=tolerance)
    assert results[0]["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        gap = (results[0]["weights"][name] - tensor).abs().max().item()
        assert gap < tolerance, f"{name}: weights are up to {gap:.2g} apart"
