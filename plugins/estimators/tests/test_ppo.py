from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from slime_estimators.ppo import PPO

from slime_core import AdvantageInputs, Advantages
from slime_core.config import Args
from slime_core.errors import ConfigError


def run(
    rewards: list[float],
    values: list[list[float]],
    masks: list[list[int]],
    kl: list[list[float]] | None = None,
    dtype: torch.dtype = torch.float32,
    chosen: dict[str, Any] | None = None,
    **settings: float,
) -> Advantages:
    args = Args(
        **{"kl_coef": 0.0, "gamma": 1.0, "lambd": 1.0, "eps_clip": 0.2, "plugins": {"ppo": chosen or {}}, **settings}
    )
    n = len(rewards)
    inputs = AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=dtype),
        response_lengths=[len(mask) for mask in masks],
        group_indices=[0] * n,
        rollout_ids=list(range(n)),
        loss_masks=[torch.tensor(mask, dtype=dtype) for mask in masks],
        kl=[torch.tensor(row, dtype=dtype) for row in kl or [[0.0] * len(m) for m in masks]],
        values=[torch.tensor(row, dtype=dtype) for row in values],
    )
    return PPO(args).advantages(args, inputs)


def by_definition(
    reward: float, values: list[float], mask: list[int], kl: list[float], kl_coef: float, gamma: float, lambd: float
) -> tuple[list[float], list[float]]:
    """A_t as the double sum over the unmasked tokens, with no recursion."""
    trained = [t for t, m in enumerate(mask) if m]
    deltas = []
    for place, t in enumerate(trained):
        last = place == len(trained) - 1
        following = 0.0 if last else values[trained[place + 1]]
        deltas.append(-kl_coef * kl[t] + (reward if last else 0.0) + gamma * following - values[t])
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for place, t in enumerate(trained):
        advantages[t] = sum((gamma * lambd) ** k * delta for k, delta in enumerate(deltas[place:]))
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def test_golden() -> None:
    result = run([1.0], [[0.1, 0.2, 0.3]], [[1, 1, 1]], gamma=0.9, lambd=0.8)
    torch.testing.assert_close(result.advantages[0], torch.tensor([0.49328, 0.574, 0.7]))
    torch.testing.assert_close(result.returns[0], torch.tensor([0.59328, 0.774, 1.0]))


def test_the_reward_is_on_the_last_unmasked_token() -> None:
    result = run([1.0], [[0.1, 0.2, 0.3, 9.0]], [[1, 1, 1, 0]], gamma=0.9, lambd=0.8)
    torch.testing.assert_close(result.advantages[0], torch.tensor([0.49328, 0.574, 0.7, 0.0]))
    torch.testing.assert_close(result.returns[0], torch.tensor([0.59328, 0.774, 1.0, 0.0]))


def test_tool_output_in_the_middle_changes_nothing() -> None:
    result = run([1.0], [[0.1, 7.0, -7.0, 0.2, 0.3]], [[1, 0, 0, 1, 1]], gamma=0.9, lambd=0.8)
    torch.testing.assert_close(result.advantages[0], torch.tensor([0.49328, 0.0, 0.0, 0.574, 0.7]))


def test_masked_positions_may_hold_anything() -> None:
    nan = float("nan")
    result = run([1.0], [[0.1, nan, 0.3]], [[1, 0, 1]], kl=[[0.1, nan, 0.2]], kl_coef=0.5)
    assert all(bool(torch.isfinite(part).all()) for part in (*result.advantages, *result.returns))


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_double_sum_in_float64(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [1, 5, 130, 260]
    masks = [[int(rng.random() < 0.7) for _ in range(n)] for n in lengths]
    masks[0] = [1]
    values, kl = ([[rng.gauss(0, 1) for _ in range(n)] for n in lengths] for _ in range(2))
    rewards = [rng.gauss(0, 1) for _ in lengths]
    settings = {"kl_coef": 0.3, "gamma": 0.97, "lambd": 0.9}
    result = run(rewards, values, masks, kl, torch.float64, **settings)
    for i in range(len(lengths)):
        advantages, returns = by_definition(rewards[i], values[i], masks[i], kl[i], **settings)
        torch.testing.assert_close(result.advantages[i], torch.tensor(advantages, dtype=torch.float64))
        torch.testing.assert_close(result.returns[i], torch.tensor(returns, dtype=torch.float64))


def test_lambdas_apart_and_by_length() -> None:
    """Returns by lambda 0.8; advantages of 3, 1 and 0 trained tokens by 1 - 1 / (0.5 n), at least 0."""
    masks, rewards = [[1, 0, 1, 1], [1], [0, 0]], [1.0, -2.0, 3.0]
    values = [[0.1, 9.0, 0.2, 0.3], [0.5], [1.0, 1.0]]
    chosen = {"critic_lambd": 0.8, "length_alpha": 0.5}
    result = run(rewards, values, masks, dtype=torch.float64, chosen=chosen, gamma=0.9)
    for i, lambd in enumerate([1 - 1 / 1.5, 0.0, 0.0]):
        kl = [0.0] * len(masks[i])
        advantages, _ = by_definition(rewards[i], values[i], masks[i], kl, 0.0, 0.9, lambd)
        _, returns = by_definition(rewards[i], values[i], masks[i], kl, 0.0, 0.9, 0.8)
        torch.testing.assert_close(result.advantages[i], torch.tensor(advantages, dtype=torch.float64))
        torch.testing.assert_close(result.returns[i], torch.tensor(returns, dtype=torch.float64))


def test_a_wrong_critic_distorts_no_return_of_lambda_1_and_credit_grows_with_length() -> None:
    """VC-PPO's reason for lambda 1, and VAPO's for lambda by length: the weights of deltas add up to alpha * n."""
    wrong = run([1.0], [[5.0, -3.0, 2.0]], [[1, 1, 1]], chosen={"critic_lambd": 1.0}, lambd=0.5)
    assert wrong.returns[0].tolist() == pytest.approx([1.0, 1.0, 1.0])
    for length in (200, 400):
        zeros = [[0.0] * length]
        found = run([1.0], zeros, [[1] * length], dtype=torch.float64, chosen={"length_alpha": 0.05})
        assert found.advantages[0].sum().item() == pytest.approx(0.05 * length, rel=1e-3)


def test_a_lambda_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--lambd 0.9 .* plugins.ppo.critic_lambd"):
        run([1.0], [[0.0]], [[1]], chosen={"critic_lambd": 1.0, "length_alpha": 0.05}, lambd=0.9)
