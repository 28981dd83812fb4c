"""What the ranks of the routing replay tests run, and the same in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slime_embedded.trainer.trainer import EmbeddedTrainer

from slime_core.protocols import StepResult
from slime_core.sample import TrainBatch
from slime_core.sample.routed_experts import FREE
from tests.backends.megatron import trainer_jobs

LAYERS, EXPERTS, PER_TOKEN = 4, 4, 2


def routed(data: TrainBatch, layers: list[int], seed: int = 5, free: float = 0.2) -> TrainBatch:
    """Names other experts than a router would, for all tokens but a share of them, the first sample's and one more."""
    arrays = []
    for tokens, index in zip(data.tokens, data.sample_indices, strict=True):
        generator = np.random.default_rng((seed, index))
        shape = (len(tokens) - 1, LAYERS)
        array = np.full((*shape, PER_TOKEN), FREE, dtype=np.int32)
        given = generator.random((*shape, EXPERTS)).argsort(-1)[..., :PER_TOKEN]
        array[:, layers] = given[:, layers]
        array[generator.random(shape) < free] = FREE
        if index in (0, 5):
            array[:] = FREE
        arrays.append(array)
    data.routed_experts = arrays
    forget_last_layer(data)
    return data


def forget_last_layer(data: TrainBatch) -> None:
    """Of the prompts: the embedded trainer does not compute them there, so its steps cannot count them."""
    assert data.routed_experts is not None
    for array, response in zip(data.routed_experts, data.response_lengths, strict=True):
        array[: len(array) - response, -1] = FREE


def replayed(trainer: Any, share: tuple[range, list[list[int]]], layers: list[int]) -> dict[str, Any]:
    """A pass that completes the routing, two steps that follow it, and what came of them."""
    part, micro_batches = share
    data = routed(trainer_jobs.batch(part), layers)
    assert data.routed_experts is not None
    before, entropy = trainer.log_probs_and_entropy(data, micro_batches)
    recorded = [array.copy() for array in data.routed_experts]
    ref = trainer.log_probs(data, micro_batches, role="ref")
    forget_last_layer(data)
    kept = [array.copy() for array in data.routed_experts]
    old = [(t + 0.1 * torch.sin(torch.arange(len(t)))).float() for t in before]
    loss_fn = trainer_jobs.clipped_loss(data, old, before)
    steps: list[StepResult] = [
        trainer.train_step(data, micro_batches, loss_fn, with_entropy=True) for _ in range(trainer_jobs.STEPS)
    ]
    for then, now in zip(kept, data.routed_experts, strict=True):
        np.testing.assert_array_equal(then, now, "a step records nothing")
    after = trainer.log_probs(data, micro_batches)
    for then, now in zip(kept, data.routed_experts, strict=True):
        np.testing.assert_array_equal(then, np.where(then == FREE, then, now), "what is known stays")
    return {
        "rank": trainer.rank,
        "recorded": recorded,
        "metrics": [step.metrics for step in steps],
        "step_log_probs": [step.log_probs for step in steps],
        "log_probs": before,
        "entropy": entropy,
        "ref": ref,
        "after": after,
        "weights": {name: tensor.detach().clone().cpu() for name, tensor in trainer.named_weights()},
    }


def embedded(model: str | Path, layers: list[int]) -> dict[str, Any]:
    """The embedded trainer over all samples in one process."""
    trainer = EmbeddedTrainer(trainer_jobs.settings(model, use_kl_loss=True))
    try:
        return replayed(trainer, trainer_jobs.shares(1)[0], layers)
    finally:
        trainer.close()


def megatron(model: str, layers: list[int], **overrides: Any) -> dict[str, Any]:
    """The Megatron trainer on this rank, over its data-parallel rank's share."""
    from slime_trainer_megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(trainer_jobs.settings(model, use_kl_loss=True, **overrides))
    try:
        shares = trainer_jobs.shares(trainer.world_size, trainer.micro_batch_multiple)
        return replayed(trainer, shares[trainer.rank], layers)
    finally:
        trainer.close()


def compare(results: list[dict[str, Any]], expected: dict[str, Any], layers: list[int], whole: bool = False) -> None:
    """Every rank's answers are the expected ones for its share; `whole`: so is what it recorded of the prompts."""
    data_size = max(result["rank"] for result in results) + 1
    for result in results:
        part, _ = trainer_jobs.shares(data_size)[result["rank"]]
        for found, wanted in zip(result["metrics"], expected["metrics"], strict=True):
            assert found == pytest.approx(wanted, rel=3e-4, abs=2e-6)
        for name in ("log_probs", "entropy", "ref", "after"):
            for tensor, position in zip(result[name], part, strict=True):
                torch.testing.assert_close(tensor, expected[name][position], rtol=0, atol=3e-4)
        for step, wanted in zip(result["step_log_probs"], expected["step_log_probs"], strict=True):
            for place, position in enumerate(part):
                torch.testing.assert_close(step[place], wanted[position], rtol=0, atol=3e-4)
        for array, position in zip(result["recorded"], part, strict=True):
            assert (array[:, layers] >= 0).all(), "every layer with experts records every token"
            dense = [layer for layer in range(LAYERS) if layer not in layers]
            assert (array[:, dense] == FREE).all()
            known = expected["recorded"][position]
            assert whole is bool((known[:, layers] >= 0).all())
            apart = (known >= 0) & (np.sort(array, -1) != np.sort(known, -1))
            assert not apart.any()
    for name, tensor in expected["weights"].items():
        gap = (results[0]["weights"][name] - tensor).abs().max().item()
        assert gap < 3e-4, f"{name}: weights are up to {gap:.2g} apart"
