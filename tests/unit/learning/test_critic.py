"""The value loss, and the learner with a critic beside the actor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from slime_core.errors import TrainError
from slime_core.estimator import EstimatorBase
from slime_core.learning.learner import Learner
from slime_core.learning.loss import PolicyLoss, value_loss
from slime_core.learning.tensors import Denominators, TrainTensors
from slime_core.ops import masked_gae, token_rewards
from slime_core.protocols import AdvantageInputs, Advantages, MicroBatchOutput
from slime_core.sample import TrainBatch
from tests.toy_trainer import Ranks, ToyTrainer, make_args, make_batch

torch.set_num_threads(1)


class ActorCritic(EstimatorBase):
    """Generalised advantages with fixed constants."""

    needs_values: ClassVar[bool] = True

    def advantages(self, args: Any, inputs: AdvantageInputs) -> Advantages:
        assert inputs.values is not None
        rewards = [
            token_rewards(r, k, m, 0.0) for r, k, m in zip(inputs.rewards.tolist(), inputs.kl, inputs.loss_masks)
        ]
        return Advantages(*masked_gae(rewards, inputs.values, inputs.loss_masks, 0.9, 0.8))


def learn(
    args: Any, batch: TrainBatch, world_size: int = 1, rollouts: int = 1
) -> tuple[list[dict[str, float]], ToyTrainer, ToyTrainer]:
    """Rank 0's metrics and trainers, after checking that all ranks agree."""
    actors, critics = ([ToyTrainer(rank, ranks, 0.5, role) for rank in range(world_size)]
                       for role, ranks in (("actor", Ranks(world_size)), ("critic", Ranks(world_size))))  # fmt: skip

    def work(rank: int) -> list[dict[str, float]]:
        estimator = ActorCritic(args)
        learner = Learner(args, actors[rank], estimator, PolicyLoss(args, estimator), critic=critics[rank])
        found = [learner.train(rollout_id, batch) for rollout_id in range(rollouts)]
        return [{k: v for k, v in metrics.items() if not k.startswith("perf/")} for metrics in found]

    with ThreadPoolExecutor(world_size) as pool:
        metrics = list(pool.map(work, range(world_size)))
    assert all(found == metrics[0] for found in metrics)
    assert all(torch.equal(t.weight, group[0].weight) for group in (actors, critics) for t in group)
    return metrics[0], actors[0], critics[0]


# -- the loss --------------------------------------------------------------------------------------------


def test_value_loss_is_clipped_masked_and_normalised() -> None:
    batch = make_batch(2)
    batch.response_lengths, batch.loss_masks, batch.rollout_mask_sums = [3, 2], [[1, 1, 0], [1, 1]], [2, 2]
    tensors = TrainTensors.from_batch(batch, torch.device("cpu"))
    tensors.values = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 0.0])]
    tensors.returns = [torch.tensor([2.0, 0.0, 5.0]), torch.tensor([1.0, 1.0])]
    values = torch.tensor([1.1, 1.5, 9.0, 0.5, -0.5], requires_grad=True)
    loss_fn = value_loss(make_args(value_clip=0.2), batch, tensors, Denominators(2, 4))
    loss, metrics = loss_fn(MicroBatchOutput([0, 1], torch.zeros(0), values=values))
    # V_clip: 1.1, 1.2, 0.2, -0.2; the larger error counts.
    terms = [(1.1 - 2) ** 2, max(1.2**2, 1.5**2), max(0.8**2, 0.5**2), max(1.2**2, 1.5**2)]
    assert loss.item() == pytest.approx(sum(terms) / 4)
    assert metrics["value_loss"].item() == pytest.approx(sum(terms) / 4)
    assert metrics["value_clipfrac"].item() == pytest.approx(0.75)
    (gradient,) = torch.autograd.grad(loss, values)
    # The third value is clipped and its clipped error is the larger: no gradient.
    assert gradient.tolist() == pytest.approx([2 * -0.9 / 4, 2 * 1.5 / 4, 0.0, 0.0, 2 * -1.5 / 4])


# -- the learner -----------------------------------------------------------------------------------------


def test_one_critic_step_by_hand() -> None:
    args, batch = make_args(), make_batch()
    (metrics,), _, critic = learn(args, batch)
    fresh = ToyTrainer(role="critic")
    old = fresh.values(batch, [list(range(8))])
    masks = [torch.tensor(mask, dtype=torch.float32) for mask in batch.loss_masks]
    rewards = [token_rewards(r, torch.zeros(len(m)), m, 0.0) for r, m in zip(batch.rewards, masks, strict=True)]
    advantages, returns = masked_gae(rewards, old, masks, 0.9, 0.8)
    loss = torch.zeros((), dtype=torch.float64)
    for i, mask in enumerate(masks):
        values = fresh.output(fresh.weight, batch, [i]).values
        assert values is not None
        loss = loss + ((values - returns[i]).square() * mask).sum() / mask.sum() / 8
    (gradient,) = torch.autograd.grad(loss, fresh.weight)
    torch.testing.assert_close(critic.weight.detach(), (fresh.weight - 0.5 * gradient).detach(), rtol=1e-6, atol=1e-6)
    assert metrics["train/critic-value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/critic-value_clipfrac"] == 0.0
    for name, column in (("values", old), ("returns", returns), ("advantages", advantages)):
        mean = sum(float((part * mask).sum() / mask.sum()) for part, mask in zip(column, masks, strict=True)) / 8
        assert metrics[f"rollout/{name}"] == pytest.approx(mean, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("world_size", "changes", "per_token"),
    [(1, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 12}, False), (4, {"micro_batch_size": 1}, True)],
)
def test_no_split_over_micro_batches_or_ranks_changes_anything(
    world_size: int, changes: dict[str, Any], per_token: bool
) -> None:
    common = {"calculate_per_token_loss": per_token, "global_batch_size": 2, "normalize_advantages": True}
    batch = make_batch(siblings=True)
    whole, actor, critic = learn(make_args(micro_batch_size=8, **common), batch, rollouts=2)
    found, same_actor, same_critic = learn(make_args(**{**common, **changes}), batch, world_size, rollouts=2)
    for a, b in zip(found, whole, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(same_actor.weight, actor.weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(same_critic.weight, critic.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("global_batch_size", [8, 4])
def test_critic_only_rollouts_leave_the_actor_alone(global_batch_size: int) -> None:
    args = make_args(num_critic_only_steps=2, global_batch_size=global_batch_size)
    metrics, actor, _ = learn(args, make_batch(), rollouts=3)
    assert actor.calls.count("train_step") == 8 // global_batch_size
    # Only the rollout that trains the actor asks for the old log-probs of its later steps.
    assert [call for call in actor.calls if call != "train_step"] == ["log_probs actor 4"] * (global_batch_size == 4)
    for number, found in enumerate(metrics):
        assert "train/critic-value_loss" in found
        assert ("train/loss" in found) == (number == 2)
        assert {"rollout/values", "rollout/advantages", "rollout/returns"} <= found.keys()
    losses = [found["train/critic-value_loss"] for found in metrics]
    assert losses[2] < losses[0]


def test_a_value_that_is_not_finite_is_said_before_the_weights_change() -> None:
    args, batch = make_args(), make_batch()
    actor, critic = ToyTrainer(), ToyTrainer(role="critic")
    with torch.no_grad():
        critic.weight[batch.tokens[2][1]] = float("nan")
    before = critic.weight.detach().clone()
    learner = Learner(args, actor, ActorCritic(args), PolicyLoss(args, ActorCritic(args)), critic=critic)
    with pytest.raises(TrainError, match=r"rollout 6: the loss of a micro-batch is nan .* values not finite\)"):
        learner.train(5, batch)
    assert torch.equal(critic.weight.detach().nan_to_num(), before.nan_to_num())
    assert "train_step" not in actor.calls
