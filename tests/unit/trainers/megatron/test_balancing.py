"""The routers' own losses and the moves of their biases in one process, against sums by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.megatron import trainer_jobs
from tests.megatron_models import save_deepseek, save_tiny
from tests.unit.trainers.megatron.steps import MICRO_BATCHES, Make

AUX, Z, RATE = 0.3, 0.02, 0.05
LOSSES = {"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}
TOKENS = sum(prompt + response for prompt, response in trainer_jobs.LENGTHS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "qwen3-moe", "qwen3-moe", vocab_size=trainer_jobs.VOCABULARY)
    save_deepseek(root / "deepseek-v3")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def make(build: Make, models: dict[str, Path]) -> Make:
    # Rows of padding, which must not count.
    return lambda model, **flags: build(models[model], **{"data_pad_size_multiplier": 32, **flags})


class Watched:
    """What a layer's router is given and what it chooses, without padding, per micro-batch."""

    def __init__(self, router: Any) -> None:
        self.inputs: list[torch.Tensor] = []
        self.chosen: list[torch.Tensor] = []
        self.router = router
        router.register_forward_hook(self._note)

    def _note(self, module: Any, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        hidden, padding = args
        real = ~padding.reshape(-1)
        assert not real.all(), "there is padding"
        self.inputs.append(hidden.detach().reshape(-1, hidden.shape[-1])[real])
        self.chosen.append(output[1][real])


def by_hand(inputs: list[torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Load balancing and z-loss of one layer, from the inputs of its router in each micro-batch."""
    balance = z = torch.zeros(())
    for rows in inputs:
        logits, n, k, experts = rows @ weight.T, len(rows), 2, len(weight)
        probs = torch.softmax(logits, -1)
        counts = torch.zeros_like(probs).scatter(1, probs.topk(k).indices, 1.0).sum(0)
        balance = balance + n / TOKENS * experts / (k * n**2) * (probs.sum(0) * counts).sum()
        z = z + logits.logsumexp(-1).square().sum() / TOKENS
    return balance, z


def nothing(output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return output.log_probs.sum() * 0, {}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_losses_are_means_over_the_steps_tokens(make: Make, kind: str, recompute: str | None) -> None:
    # One kind is the default where a coefficient is given.
    named = {} if kind == "aux_loss" else {"moe_router_load_balancing_type": kind}
    trainer = make("qwen3-moe", recompute_granularity=recompute, **LOSSES, **named)
    layers = [Watched(layer.mlp.router) for layer in trainer.models.chunks[0].decoder.layers]
    weight = layers[-1].router.weight.detach().clone().requires_grad_()
    data = trainer_jobs.batch()
    with trainer._on_device():
        trainer.optimizer.zero_grad()

        def output(head: Any, hidden: torch.Tensor, micro: Any) -> Any:
            return head.output(hidden, micro, False)

        found = trainer._schedule.accumulate(data, MICRO_BATCHES, nothing, output)
    sizes = [sum(len(data.tokens[i]) for i in micro) for micro in MICRO_BATCHES]
    assert [len(rows) for rows in layers[-1].inputs] == sizes
    balance, z = by_hand(layers[-1].inputs, weight)
    (AUX * balance + Z * z).backward()
    torch.testing.assert_close(layers[-1].router.weight.main_grad, weight.grad, rtol=1e-4, atol=1e-7)
    name = "router_load_balancing_loss" if kind == "aux_loss" else "router_seq_load_balancing_loss"
    assert found.metrics.keys() == {name, "router_z_loss"}
    all_layers = torch.tensor([by_hand(layer.inputs, layer.router.weight.detach()) for layer in layers])
    assert [found.metrics[name], found.metrics["router_z_loss"]] == pytest.approx(all_layers.mean(0).tolist())


def test_a_step_moves_the_bias_of_experts(make: Make) -> None:
    """By the rate, towards experts with fewer tokens than the mean; saved and sent with the weights."""
    trainer = make("deepseek-v3", moe_router_bias_update_rate=RATE)
    watched = Watched(trainer.models.chunks[0].decoder.layers[-1].mlp.router)
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    before = dict(trainer.named_weights())[name].clone()
    data = trainer_jobs.batch()
    trainer.log_probs(data, MICRO_BATCHES)
    assert torch.equal(dict(trainer.named_weights())[name], before), "a pass without gradient counts nothing"
    for _ in range(2):
        trainer.train_step(data, MICRO_BATCHES, lambda output: (output.log_probs.sum(), {}))
        counts = torch.cat(watched.chosen).float().sum(0)
        assert counts.sum() == TOKENS * 4
        before = before + RATE * torch.sign(counts.mean() - counts)
        torch.testing.assert_close(dict(trainer.named_weights())[name], before, rtol=0, atol=1e-6)
        watched.chosen.clear()
    broken = trainer.train_step(data, MICRO_BATCHES, lambda output: (output.log_probs.sum() * math.inf, {}))
    assert broken.metrics["skipped_steps"] == 1
    torch.testing.assert_close(dict(trainer.named_weights())[name], before, rtol=0, atol=0)
