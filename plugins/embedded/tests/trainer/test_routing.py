"""Routing replay of the embedded trainer, with the embedded engine for a source of experts (R3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from slime_embedded.engine.core import CoreOptions, EngineCore
from slime_embedded.trainer.trainer import EmbeddedTrainer
from slime_testing_contracts.tiny import tiny_moe_model

from slime_core.config import Args
from slime_core.errors import TrainError
from slime_core.learning.learner import routing_arrays
from slime_core.models.config import ModelConfig, load_model_config
from slime_core.models.family import routed_layers
from slime_core.models.hf_io import read_weights
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch
from slime_core.sample.routed_experts import FREE

LAYERS_WITH_EXPERTS = [0, 2]
TILED = "true_on_policy_mode"
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_model_config(tiny_moe_model())


def perturbed(scale: float) -> Weights:
    """The tiny model's weights with another router: what a trainer computes in another precision, made visible."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: w + scale * w.std() * torch.randn(w.shape, generator=generator) if name.endswith("mlp.gate.weight") else w
        for name, w in read_weights(tiny_moe_model())
    }


def trainer(weights: Weights | None = None, **changes: Any) -> EmbeddedTrainer:
    defaults = {"hf_checkpoint": str(tiny_moe_model()), "lr": 1e-2, "lr_decay_style": "constant", "num_rollout": 4,
                "lr_warmup_iters": 0, "train_iters": 10}  # fmt: skip
    made = EmbeddedTrainer(Args(**defaults | changes))
    if weights is not None:
        with torch.no_grad():
            for name, tensor in made.named_weights():
                tensor.copy_(weights[name])
    return made


def rollout(config: ModelConfig) -> tuple[TrainBatch, list[np.ndarray]]:
    """Six sampled responses with log-probs and experts, and the engine's experts once more."""
    core = EngineCore(config, read_weights(tiny_moe_model()), options=CoreOptions(seed=1))
    prompts = [[3, 4, 5, 6, 7, 8] * 4, [9, 10, 11]] * 3
    sampled = [
        core.add_request(prompt, {"max_new_tokens": 10 + i, "temperature": 1.0}, f"r{i}")
        for i, prompt in enumerate(prompts)
    ]
    while core.has_work:
        core.step()
    n, lengths = len(sampled), [s.num_output for s in sampled]
    experts = [core.routed_experts(s) for s in sampled]
    batch = TrainBatch(
        rollout_id=0, tokens=[s.tokens for s in sampled], response_lengths=lengths,
        loss_masks=[[1] * k for k in lengths], rewards=[1.0, -1.0] * 3, raw_rewards=[0.0] * n, truncated=[0] * n,
        sample_indices=list(range(n)), group_indices=[0] * n, rollout_ids=list(range(n)), rollout_mask_sums=lengths,
        rollout_log_probs=[s.log_probs for s in sampled], routed_experts=list(experts),
    )  # fmt: skip
    batch.routed_experts = list(routing_arrays(batch, routed_layers(tiny_moe_model(), None)))
    return batch, [np.asarray(e) for e in experts]


def gap(found: list[torch.Tensor], batch: TrainBatch) -> float:
    assert batch.rollout_log_probs is not None
    pairs = zip(found, batch.rollout_log_probs, strict=True)
    return max(float((a - torch.tensor(b)).abs().max()) for a, b in pairs)


def loss_of(batch: TrainBatch) -> Any:
    def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        lengths = [batch.response_lengths[i] for i in output.positions]
        weights = torch.tensor([batch.rewards[i] for i in output.positions]).repeat_interleave(torch.tensor(lengths))
        loss = -(output.log_probs * weights).sum() / sum(batch.response_lengths)
        return loss, {"loss": loss}

    return loss_fn


SPLIT = [[4, 1], [0], [5, 2, 3]]


def test_replay_closes_the_gap_that_routing_opens(config: ModelConfig) -> None:
    """The same weights but for a slightly other router: only replay gives the engine's log-probs back, nearly."""
    weights = perturbed(0.02)
    batch, _ = rollout(config)
    model = trainer(weights)
    with_replay = gap(model.log_probs(batch, SPLIT), batch)
    free = TrainBatch(**{**vars(batch), "routed_experts": None})
    without = gap(model.log_probs(free, SPLIT), batch)
    assert with_replay < without / 3, (with_replay, without)
    same = trainer()
    assert gap(same.log_probs(batch, SPLIT), batch) < 1e-4
    model.close()
    same.close()


def test_the_experts_used_are_the_engines(config: ModelConfig) -> None:
    """Two ways: with the engine's weights free routing finds them, with other weights replay keeps them."""
    batch, experts = rollout(config)
    model = trainer()
    batch.routed_experts = [np.full(e.shape, FREE, np.int32) for e in experts]
    model.log_probs(batch, SPLIT)
    for i, (found, engine) in enumerate(zip(batch.routed_experts, experts, strict=True)):
        first = len(batch.tokens[i]) - batch.response_lengths[i] - 1
        np.testing.assert_array_equal(np.sort(found[:, 0]), np.sort(engine[:, 0]))
        # The last layer computes only the rows that predict a response token.
        np.testing.assert_array_equal(np.sort(found[first:, 2]), np.sort(engine[first:, 2]))
        assert (found[:first, 2] == FREE).all()
        assert (found[:, 1] == FREE).all(), "a dense layer"
    model.close()


def test_a_pass_records_and_the_steps_replay(config: ModelConfig) -> None:
    batch, experts = rollout(config)
    batch.routed_experts = [np.full(e.shape, FREE, np.int32) for e in experts]
    model = trainer(clip_grad=0.0, lr=3e-2)
    later = batch.select([3, 5])
    model.log_probs(later, [[0, 1]])
    assert (batch.routed_experts[3][:, 0] >= 0).all(), "what a pass over a selection records is seen in the whole"
    assert (batch.routed_experts[0] == FREE).all()
    model.log_probs(batch, SPLIT)
    recorded = [array.copy() for array in batch.routed_experts]
    mismatches = [model.train_step(batch, SPLIT, loss_of(batch)).metrics["routing_mismatch"] for _ in range(4)]
    assert mismatches[0] == 0.0, "the weights that recorded choose what they recorded"
    assert 0 < mismatches[-1] < 1, "four steps later they choose others"
    for before, after in zip(recorded, batch.routed_experts, strict=True):
        np.testing.assert_array_equal(before, after)
    model.close()


@pytest.mark.parametrize("changes", [{"recompute_granularity": "full"}, {TILED: True}])
def test_recomputed_and_tiled_passes_replay_alike(config: ModelConfig, changes: dict[str, Any]) -> None:
    batch, _ = rollout(config)
    weights = perturbed(0.1)
    found = []
    for flags in ({}, changes):
        model = trainer(weights, **flags)
        metrics = model.train_step(batch, SPLIT, loss_of(batch)).metrics
        found.append((metrics, {name: w.clone() for name, w in model.named_weights()}))
        model.close()
    (plain, plain_weights), (other, other_weights) = found
    # In tiles the last layer computes the prompt's rows too, so they count.
    assert 0 < plain["routing_mismatch"] < 1
    assert other["routing_mismatch"] == pytest.approx(plain["routing_mismatch"], abs=0.03 * bool(changes.get(TILED)))
    assert other["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert other["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
    assert plain_weights.keys() == other_weights.keys()


def test_free_positions_are_routed_by_the_trainer(config: ModelConfig) -> None:
    """Half the rows unknown, one sample without any: log-probs are those of the mixed routing, none missing."""
    batch, _ = rollout(config)
    model = trainer()
    expected = model.log_probs(batch, SPLIT)
    assert batch.routed_experts is not None
    for array in batch.routed_experts:
        array[::2] = FREE
    batch.routed_experts[1][:] = FREE
    for a, b in zip(expected, model.log_probs(batch, SPLIT), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    model.close()


def test_engines_rows_become_arrays(config: ModelConfig) -> None:
    batch, experts = rollout(config)
    layers, per_token = config.num_layers, 2
    zeros = np.zeros((len(batch.tokens[0]) - 1, layers, per_token), np.int32)
    batch.routed_experts = [zeros, None, *(e.tolist() for e in experts[2:])]
    arrays = routing_arrays(batch, routed_layers(tiny_moe_model(), None))
    assert (arrays[0] == FREE).all(), "an expert named twice: the engine did not route there"
    assert (arrays[1] == FREE).all()
    np.testing.assert_array_equal(arrays[2][:, LAYERS_WITH_EXPERTS], experts[2][:, LAYERS_WITH_EXPERTS])
    assert (arrays[2][:, 1] == FREE).all()


@pytest.mark.parametrize("change", [lambda e: e[:-1], lambda e: e[:, :2], lambda e: e[:, :, :1], lambda e: e + 7])
def test_another_models_experts_are_an_error(config: ModelConfig, change: Any) -> None:
    batch, experts = rollout(config)
    batch.routed_experts = [change(e) for e in experts]
    with pytest.raises(TrainError, match="this model has 3 layers and 2 of 8 experts"):
        routing_arrays(batch, routed_layers(tiny_moe_model(), None))
