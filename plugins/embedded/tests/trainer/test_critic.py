from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slime_embedded.trainer.trainer import EmbeddedTrainer
from transformers import AutoModelForTokenClassification

from slime_core.errors import CheckpointError
from slime_core.models.hf_io import read_weights, write_weights
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch

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


def test_saved_critics_are_transformers_token_classifiers(
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


def test_gradients_equal_transformers(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    critic, batch = trained(make_args, make_batch), make_batch(5, seed=9)
    critic.save(tmp_path / "critic")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    loss = torch.zeros(())
    for tokens, length, reward in zip(batch.tokens, batch.response_lengths, batch.rewards, strict=True):
        values = model(torch.tensor([tokens])).logits[0, -length - 1 : -1, 0]
        loss = loss + (values - reward).square().sum() / sum(batch.response_lengths)
    loss.backward()
    critic.train_step(batch, [[0, 3], [1, 2, 4]], squared_error(batch))
    expected = dict(model.named_parameters())
    clip = min(1.0, 1.0 / float(torch.stack([p.grad.norm() for p in expected.values()]).norm()))
    for name, parameter in critic.model.named_parameters():
        torch.testing.assert_close(parameter.grad, clip * expected[name].grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("save_dtype", ["float32", "bfloat16"])
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


def test_an_output_layer_of_its_own_is_dropped(make_args: MakeArgs, make_batch: MakeBatch, model_dir: Path) -> None:
    tensors = dict(read_weights(model_dir))
    write_weights(model_dir, {**tensors, "lm_head.weight": torch.randn(61, 32)}.items())
    hf = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**hf, "tie_word_embeddings": False}))
    critic = make_critic(make_args())
    assert {name for name, _ in critic.named_weights()} == {*tensors, "score.weight", "score.bias"}


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
