"""Routing replay in one process: the embedded trainer's, and against sums by hand for each kind of router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slime_trainer_megatron.step.routing import MicroRouting
from slime_trainer_megatron.trainer import MegatronTrainer

from slime_core.sample.routed_experts import FREE
from tests.backends.megatron import routing_jobs, trainer_jobs
from tests.megatron_models import save_deepseek, save_tiny
from tests.unit.trainers.megatron.steps import MICRO_BATCHES, Make

ALL, MIXED = [0, 1, 2, 3], [1, 3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for variant in ("qwen3-moe", "qwen3-moe-mixed"):
        save_tiny(root / variant, variant, vocab_size=trainer_jobs.VOCABULARY)
    save_deepseek(root / "deepseek-v3")
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(("model", "layers"), [("qwen3-moe", ALL), ("qwen3-moe-mixed", MIXED)])
def test_it_is_the_embedded_trainers(models: dict[str, Path], model: str, layers: list[int]) -> None:
    """Normalised weights with experts everywhere; plain ones, with every other layer dense."""
    expected = routing_jobs.embedded(models[model], layers)
    result = routing_jobs.megatron(str(models[model]), layers)
    assert all(0.3 < metrics["routing_mismatch"] < 1 for metrics in result["metrics"]), "other experts than its own"
    routing_jobs.compare([result], expected, layers)


@pytest.fixture
def make(build: Make, models: dict[str, Path]) -> Make:
    return lambda model, **flags: build(models[model], **flags)


def routers(trainer: MegatronTrainer) -> list[Any]:
    layers = trainer.models.chunks[0].decoder.layers
    return [layer.mlp.router for layer in layers if hasattr(layer.mlp, "router")]


def free(trainer: MegatronTrainer) -> Any:
    """A batch of which no token's experts are known."""
    data = trainer_jobs.batch()
    shape = (4, int(trainer.models.config.moe_router_topk))
    data.routed_experts = [np.full((len(t) - 1, *shape), FREE, np.int32) for t in data.tokens]
    return data


KINDS = ["qwen3-moe", "qwen3-moe-mixed", "deepseek-v3"]


@pytest.mark.slow
@pytest.mark.parametrize("model", KINDS)
def test_its_own_experts_change_nothing(make: Make, model: str) -> None:
    """A pass records; the next one and a step, which follow it, are bit for bit the free ones."""
    trainer = make(model)
    plain = trainer.log_probs(trainer_jobs.batch(), MICRO_BATCHES)
    data = free(trainer)
    for found in (trainer.log_probs(data, MICRO_BATCHES), trainer.log_probs(data, MICRO_BATCHES)):
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    sparse = [int(layer.layer_number) - 1 for layer in trainer.models.chunks[0].decoder.layers if _sparse(layer)]
    assert all((array[:, sparse] >= 0).all() for array in data.routed_experts)
    assert all((np.delete(array, sparse, axis=1) == FREE).all() for array in data.routed_experts)
    gathered = np.concatenate([array[:, sparse].reshape(-1) for array in data.routed_experts])
    assert set(gathered) == set(range(int(trainer.models.config.num_moe_experts)))
    result = trainer.train_step(data, MICRO_BATCHES, lambda output: (output.log_probs.sum(), {}))
    assert result.metrics["routing_mismatch"] == 0
    assert all(torch.equal(result.log_probs[i], tensor) for i, tensor in enumerate(plain))


def _sparse(layer: Any) -> bool:
    return hasattr(layer.mlp, "router")


def _by_hand(model: str, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[rows, k] weights of these experts."""
    if model == "deepseek-v3":
        scores = torch.sigmoid(logits).gather(1, experts)
        return 2.5 * scores / scores.sum(-1, keepdim=True)
    weights = torch.softmax(logits, -1).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) if model == "qwen3-moe" else weights


@pytest.mark.parametrize("model", KINDS)
def test_weights_are_the_routers_at_the_named_experts(make: Make, model: str) -> None:
    """Of experts that its bias and its groups would never choose together as well, with gradients."""
    trainer = make(model)
    router = routers(trainer)[-1]
    generator = torch.Generator().manual_seed(0)
    rows, k, layer = 6, router.topk, router.router_replay.layer
    given = torch.rand((rows, router.num_experts), generator=generator).argsort(-1)[:, :k]
    given[3] = FREE
    logits = torch.randn((rows, 1, router.num_experts), generator=generator).requires_grad_()
    with trainer._on_device():
        routing = MicroRouting(slice(0, rows), {layer: given.to(torch.int16)})
        _, own_map = router.routing(logits)
        with router.router_replay.following(routing):
            probs, routing_map = router.routing(logits)
    own = own_map.nonzero()[:, 1].reshape(rows, k)
    used = torch.where(given < 0, own, given)
    assert torch.equal(routing_map, torch.zeros_like(own_map).scatter(1, used, True))
    weights = torch.zeros(rows, router.num_experts).scatter(1, used, _by_hand(model, logits[:, 0], used))
    torch.testing.assert_close(probs, weights, rtol=0, atol=1e-6)
    weighting = torch.randn(probs.shape, generator=generator)
    (found,) = torch.autograd.grad((probs * weighting).sum(), logits)
    (wanted,) = torch.autograd.grad((weights * weighting).sum(), logits)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert torch.equal(routing.chosen[layer].long().sort(-1).values, used.sort(-1).values)
    apart = int((used.sort(-1).values != own).any(-1).sum())
    assert routing.mismatches[layer].tolist() == [apart, rows - 1]
