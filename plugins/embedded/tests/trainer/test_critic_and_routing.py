"""The critic against transformers, and routing replay with the experts of the embedded engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from slime_embedded.engine.core import CoreOptions, EngineCore
from slime_embedded.trainer.trainer import EmbeddedTrainer
from slime_testing_contracts.tiny import tiny_moe_model
from transformers import AutoModelForTokenClassification

from slime_core.config import Args
from slime_core.errors import CheckpointError
from slime_core.learning.learner import routing_arrays
from slime_core.models.config import ModelConfig, load_model_config
from slime_core.models.family import routed_layers
from slime_core.models.hf_io import read_weights
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch
from slime_core.sample.routed_experts import FREE
from tests.batches import train_batch

MakeArgs = Callable[..., SimpleNamespace]
MakeBatch = Callable[..., TrainBatch]


def make_critic(args: Any) -> EmbeddedTrainer:
    return EmbeddedTrainer(args, role="critic")


def squared_error(batch: TrainBatch) -> Callable[[MicroBatchOutput], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """To the sample's reward, over all response tokens of the batch."""
    total = sum(batch.response_lengths)

    def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert output.values is not None
        assert output.log_probs.numel() == 0
        targets = torch.cat([torch.full((batch.response_lengths[p],), batch.rewards[p]) for p in output.positions])
        loss = (output.values - targets).square().sum() / total
        return loss, {"value_loss": loss}

    return loss_fn


def trained(make_args: MakeArgs, make_batch: MakeBatch, steps: int = 3, **changes: Any) -> EmbeddedTrainer:
    critic = make_critic(make_args(**changes))
    for step in range(steps):
        batch = make_batch(8, seed=step)
        critic.train_step(batch, [[0, 1, 2, 3], [4, 5, 6, 7]], squared_error(batch))
    return critic


def test_values_start_at_zero_and_learn_the_reward(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    critic, batch = make_critic(make_args()), make_batch(8)
    everything = [list(range(8))]
    assert all(not part.any() for part in critic.values(batch, everything))
    losses = [critic.train_step(batch, everything, squared_error(batch)).metrics["value_loss"] for _ in range(60)]
    assert losses[-1] < losses[0] / 3
    found = [part[-1].item() for part in critic.values(batch, everything)]
    assert torch.corrcoef(torch.tensor([found, batch.rewards]))[0, 1] > 0.8


def test_saved_critics_are_transformers_token_classifiers_with_their_gradients(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path
) -> None:
    critic, batch = trained(make_args, make_batch), make_batch(6, seed=9)
    critic.save(tmp_path / "critic")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    assert type(model).__name__ == "Qwen3ForTokenClassification"
    assert model.config.num_labels == 1
    for tokens, length, found in zip(
        batch.tokens, batch.response_lengths, critic.values(batch, [[0, 4], [1, 2, 3, 5]]), strict=True
    ):
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0, -length - 1 : -1, 0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert found.any()
    loss = torch.zeros(())
    for tokens, length, reward in zip(batch.tokens, batch.response_lengths, batch.rewards, strict=True):
        values = model(torch.tensor([tokens])).logits[0, -length - 1 : -1, 0]
        loss = loss + (values - reward).square().sum() / sum(batch.response_lengths)
    loss.backward()
    critic.train_step(batch, [[0, 3, 5], [1, 2, 4]], squared_error(batch))
    expected_of = dict(model.named_parameters())
    clip = min(1.0, 1.0 / float(torch.stack([p.grad.norm() for p in expected_of.values()]).norm()))
    for name, parameter in critic.model.named_parameters():
        torch.testing.assert_close(parameter.grad, clip * expected_of[name].grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("save_dtype", ["bfloat16"])
def test_save_and_load_go_on_bit_for_bit(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, save_dtype: str
) -> None:
    whole = trained(make_args, make_batch, 5, save_dtype=save_dtype)
    first = trained(make_args, make_batch, 3, save_dtype=save_dtype)
    first.save(tmp_path / "critic")
    again = make_critic(make_args(save_dtype=save_dtype))
    again.load(tmp_path / "critic")
    for step in (3, 4):
        batch = make_batch(8, seed=step)
        again.train_step(batch, [[0, 1, 2, 3], [4, 5, 6, 7]], squared_error(batch))
    assert torch.equal(again.optimizer.values, whole.optimizer.values)
    assert all(
        torch.equal(a, b) for a, b in zip(again.optimizer.moments().values(), whole.optimizer.moments().values())
    )


def test_critic_load_takes_the_head_of_a_critic_and_drops_another(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path
) -> None:
    batch, source = make_batch(4), trained(make_args, make_batch)
    source.save(tmp_path / "critic")
    loaded = make_critic(make_args(critic_load=str(tmp_path / "critic")))
    expected = torch.cat(source.values(batch, [[0, 1, 2, 3]]))
    assert torch.equal(torch.cat(loaded.values(batch, [[0, 1, 2, 3]])), expected)
    path = tmp_path / "critic" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "score.weight": torch.ones(3, 32), "score.bias": torch.ones(3)}, path)
    fresh = make_critic(make_args(critic_load=str(tmp_path / "critic")))
    assert not torch.cat(fresh.values(batch, [[0, 1, 2, 3]])).any()


def test_its_own_learning_rate_and_all_parameters(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    flags = {"critic_lr": 0.5, "freeze_params_name_list": ["embed"], "kl_coef": 0.1}
    args, batch = make_args(**flags), make_batch(2)
    actor, critic = EmbeddedTrainer(args), make_critic(args)
    assert critic.train_step(batch, [[0, 1]], squared_error(batch)).metrics["lr"] == 0.5
    assert actor.train_step(batch, [[0, 1]], lambda out: (out.log_probs.sum(), {})).metrics["lr"] == 1e-2
    assert "model.embed_tokens.weight" in critic.optimizer.shapes
    assert "model.embed_tokens.weight" not in actor.optimizer.shapes


def test_an_actors_checkpoint_is_not_a_critics(make_args: MakeArgs, tmp_path: Path) -> None:
    EmbeddedTrainer(make_args()).save(tmp_path / "actor")
    with pytest.raises(CheckpointError, match=r"trained parameter score\.bias: not trained then"):
        make_critic(make_args()).load(tmp_path / "actor")


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
    experts = [core.routed_experts(s) for s in sampled]
    batch = train_batch(
        [[1] * s.num_output for s in sampled], tokens=[s.tokens for s in sampled], rewards=[1.0, -1.0] * 3,
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
