"""The Megatron trainer over several ranks, beyond the steps of a plain actor."""

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

Ranks = Callable[[int], RankPool]
TP2, PP2, CP2 = ({f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "dense", "qwen3", vocab_size=jobs.VOCABULARY)
    save_tiny(root / "experts", "qwen3-moe", vocab_size=jobs.VOCABULARY)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("chunk_size", [-1, 3])
def test_log_probs_from_a_split_vocabulary(ranks: Ranks, chunk_size: int) -> None:
    """The second rank has 6 tokens and 4 columns of padding."""
    results = ranks(2).run(f"{jobs.__name__}:split_vocabulary", chunk_size=chunk_size)
    logits, targets = jobs.vocabulary_example()
    leaf = logits.clone().requires_grad_()
    log_p = torch.log_softmax(leaf[:, : jobs.TOKENS] / jobs.TEMPERATURE, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
    jobs.vocabulary_loss(log_probs, entropy).backward()
    assert leaf.grad is not None
    for result in results:
        torch.testing.assert_close(result["log_probs"], log_probs.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(result["entropy"], entropy.detach(), rtol=0, atol=1e-12)
    together = torch.cat([result["grad"] for result in results], dim=1)
    torch.testing.assert_close(together, leaf.grad, rtol=0, atol=1e-12)


def test_responses_are_whole_on_every_context_rank(ranks: Ranks) -> None:
    results = ranks(2).run(f"{jobs.__name__}:gathered_places")
    for rank, (whole, grad) in enumerate(results):
        assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        # d/dx of sum(x^3), at the places of this rank alone.
        assert grad.tolist() == ([0.0, 27.0] if rank == 0 else [3.0, 48.0, 12.0])


def test_ranks_with_other_numbers_of_micro_batches_share_experts(ranks: Ranks, models: dict[str, Path]) -> None:
    flags: dict[str, Any] = {"model": str(models["experts"]), "expert_model_parallel_size": 2, "uneven": True}
    jobs.compare(ranks(2).run(f"{jobs.__name__}:megatron", **flags), jobs.embedded(models["experts"]))


@pytest.mark.parametrize(
    ("chosen", "hf"), [("embed_tokens", "embed_tokens"), (r"layers\.3.*linear_qkv\.", r"layers\.3.*[qkv]_proj")]
)
def test_only_one_stage_learns(ranks: Ranks, models: dict[str, Path], chosen: str, hf: str) -> None:
    listed = {"model": str(models["dense"]), "only_train_params_name_list": [chosen]}
    results = ranks(2).run(f"{jobs.__name__}:megatron", **listed, **PP2)
    jobs.compare(results, jobs.embedded(models["dense"], only_train_params_name_list=[hf]))


@pytest.mark.parametrize("layout", [TP2 | {"sequence_parallel": True}, PP2, CP2], ids=["TP2+SP", "PP2", "CP2"])
def test_a_loss_of_the_router_does_not_depend_on_the_layout(
    ranks: Ranks, models: dict[str, Path], layout: dict[str, Any]
) -> None:
    balanced = {
        "moe_aux_loss_coeff": 0.5,
        "moe_router_load_balancing_type": "aux_loss",
        "model": str(models["experts"]),
    }
    (expected,) = ranks(1).run(f"{jobs.__name__}:megatron", **balanced)
    without = jobs.embedded(models["experts"])
    assert expected["metrics"][0]["grad_norm"] != pytest.approx(without["metrics"][0]["grad_norm"], rel=1e-2)
    jobs.compare(ranks(2).run(f"{jobs.__name__}:megatron", **balanced, **layout), expected)
