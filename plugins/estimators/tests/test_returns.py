"""Returns and advantages over tokens: the scan, masked GAE, PPO, VAPO, REINFORCE++ and its variant with a baseline."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from slime_estimators.returns import discounted_returns, gae, masked_gae, pad_right, unpad

from slime_core import AdvantageInputs, Advantages, resolve
from slime_core.config import Args
from slime_core.errors import ConfigError
from tests.sweeps import sweep

NAN = float("nan")


def serial(values: torch.Tensor, decay: float) -> torch.Tensor:
    out, carry = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        carry = values[:, t] + decay * carry
        out[:, t] = carry
    return out


@sweep("gamma, length, dtype", product([0.0, 0.5, 1.0], [1, 128, 129, 1000], [torch.float32, torch.float64]))
def test_chunked_equals_serial(gamma: float, length: int, dtype: torch.dtype) -> None:
    rewards = torch.randn(3, length, dtype=dtype, generator=torch.Generator().manual_seed(length))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(
        discounted_returns(rewards, gamma), serial(rewards, gamma), rtol=tolerance, atol=tolerance
    )


def test_gae_of_a_long_batch_is_that_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(64, 8192, generator=generator) for _ in range(2))
    found = gae(rewards, values, 0.99, 0.95)
    for narrow, wide in zip(found, gae(rewards.double(), values.double(), 0.99, 0.95)):
        torch.testing.assert_close(narrow, wide.float(), rtol=2e-7, atol=1e-7)


def test_gae_limits() -> None:
    generator = torch.Generator().manual_seed(2)
    rewards, values = (torch.rand(2, 150, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages, returns = gae(rewards, values, gamma=0.95, lambd=1.0)
    torch.testing.assert_close(returns, serial(rewards, 0.95))
    torch.testing.assert_close(advantages, returns - values)
    one_step, _ = gae(rewards, values, gamma=0.95, lambd=0.0)
    following = torch.cat([values[:, 1:], torch.zeros(2, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(one_step, rewards + 0.95 * following - values)


def test_padding_stays_zero_and_masked_gae_without_masks_is_gae() -> None:
    generator, lengths = torch.Generator().manual_seed(5), [3, 200, 1]
    rewards, values = ([torch.randn(n, generator=generator).double() for n in lengths] for _ in range(2))
    assert not discounted_returns(pad_right(rewards), 0.9)[0, 3:].any()
    found = masked_gae(rewards, values, [torch.ones(n) for n in lengths], 0.97, 0.9)
    expected = gae(pad_right(rewards), pad_right(values), 0.97, 0.9)
    for parts, padded in zip(found, expected, strict=True):
        for part, row in zip(parts, unpad(padded, lengths), strict=True):
            torch.testing.assert_close(part, row, rtol=1e-12, atol=1e-12)
    assert masked_gae([], [], [], 0.9, 0.8) == ([], [])


# -- estimators ------------------------------------------------------------------------------------------


def run(
    rewards: list[float], masks: list[list[int]], values: list[list[float]] | None = None,
    kl: list[list[float]] | None = None, *, name: str = "ppo", chosen: dict[str, Any] | None = None, **settings: float,
) -> Advantages:  # fmt: skip
    defaults = {"kl_coef": 0.0, "gamma": 1.0, "lambd": 1.0, "eps_clip": 0.2, "plugins": {name: chosen or {}}}
    args, n = Args(**defaults | settings), len(rewards)

    def column(rows: list[list[float]] | list[list[int]] | None) -> list[torch.Tensor]:
        return [torch.tensor(row, dtype=torch.float64) for row in rows or [[0.0] * len(mask) for mask in masks]]

    inputs = AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64), response_lengths=[len(mask) for mask in masks],
        group_indices=[0] * n, rollout_ids=list(range(n)), loss_masks=column(masks), kl=column(kl),
        values=column(values),
    )  # fmt: skip
    found: Advantages = resolve("estimators", name).obj(args).advantages(args, inputs)
    return found


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


@pytest.mark.parametrize(
    ("values", "mask"),
    [
        ([0.1, 0.2, 0.3], [1, 1, 1]),
        ([0.1, 0.2, 0.3, 9.0], [1, 1, 1, 0]),
        ([0.1, NAN, -7.0, 0.2, 0.3], [1, 0, 0, 1, 1]),  # a tool's output in the middle
    ],
)
def test_golden_advantages_of_ppo_do_not_see_masked_tokens(values: list[float], mask: list[int]) -> None:
    kl = [[0.0 if m else NAN for m in mask]]
    found = run([1.0], [mask], [values], kl, gamma=0.9, lambd=0.8)
    kept = torch.tensor(mask) != 0
    for part, golden in ((found.advantages[0], [0.49328, 0.574, 0.7]), (found.returns[0], [0.59328, 0.774, 1.0])):
        assert part[kept].tolist() == pytest.approx(golden)
        assert not part[~kept].any()


def test_ppo_is_the_double_sum_in_float64() -> None:
    rng, lengths = random.Random(0), [1, 5, 130, 260]
    masks = [[int(n == 1 or rng.random() < 0.7) for _ in range(n)] for n in lengths]
    values, kl = ([[rng.gauss(0, 1) for _ in range(n)] for n in lengths] for _ in range(2))
    rewards = [rng.gauss(0, 1) for _ in lengths]
    settings = {"kl_coef": 0.3, "gamma": 0.97, "lambd": 0.9}
    result = run(rewards, masks, values, kl, **settings)
    for i in range(len(lengths)):
        advantages, returns = by_definition(rewards[i], values[i], masks[i], kl[i], **settings)
        torch.testing.assert_close(result.advantages[i], torch.tensor(advantages, dtype=torch.float64))
        torch.testing.assert_close(result.returns[i], torch.tensor(returns, dtype=torch.float64))


@pytest.mark.parametrize(("name", "critic", "alpha"), [("ppo", 0.8, 0.5), ("vapo", 1.0, 0.05)])
def test_lambdas_apart_and_by_length(name: str, critic: float, alpha: float) -> None:
    """Returns by one lambda; advantages of n trained tokens by 1 - 1 / (alpha n), at least 0."""
    masks, rewards = [[1, 0, 1, 1, *[1] * 37], [1], [0, 0]], [1.0, -2.0, 3.0]
    values = [[0.1, 9.0, 0.2, 0.3, *[0.5] * 37], [0.5], [1.0, 1.0]]
    chosen = {"critic_lambd": critic, "length_alpha": alpha} if name == "ppo" else {}
    result = run(rewards, masks, values, name=name, chosen=chosen, gamma=0.9)
    for i, mask in enumerate(masks):
        lambd, kl = max(0.0, 1 - 1 / (alpha * max(sum(mask), 1))), [0.0] * len(mask)
        advantages, _ = by_definition(rewards[i], values[i], mask, kl, 0.0, 0.9, lambd)
        _, returns = by_definition(rewards[i], values[i], mask, kl, 0.0, 0.9, critic)
        torch.testing.assert_close(result.advantages[i], torch.tensor(advantages, dtype=torch.float64))
        torch.testing.assert_close(result.returns[i], torch.tensor(returns, dtype=torch.float64))


def test_a_lambda_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--lambd 0.9 .* plugins.ppo.critic_lambd"):
        run([1.0], [[1]], chosen={"critic_lambd": 1.0, "length_alpha": 0.05}, lambd=0.9)


@pytest.mark.parametrize(
    ("name", "rewards", "masks", "kl", "settings", "expected"),
    [
        ("grpo", [0.5, -1.5], [[1, 1], [1, 0, 1]], [[0.1] * 2, [0.1] * 3], {}, [[0.5] * 2, [-1.5] * 3]),
        ("reinforce_plus_plus", [1.0], [[1, 1, 0]], [[0.1, 0.2, 0.3]], {"kl_coef": 0.1, "gamma": 0.9},
         [[0.872, 0.98, 0.0]]),
        ("reinforce_plus_plus_baseline", [1.0, -0.5], [[1, 1, 0], [1]], [[0.1, 0.2, 0.3], [2.0]], {"kl_coef": 0.1},
         [[0.99, 0.98, 0.97], [-0.7]]),
    ],
)  # fmt: skip
def test_golden_returns(
    name: str, rewards: list[float], masks: list[list[int]], kl: list[list[float]], settings: dict[str, float],
    expected: list[list[float]],
) -> None:  # fmt: skip
    found = run(rewards, masks, kl=kl, name=name, **settings)
    for part, other, row in zip(found.advantages, found.returns, expected, strict=True):
        assert part.tolist() == other.tolist() == pytest.approx(row)


def test_reinforce_plus_plus_against_a_serial_reference() -> None:
    rng, lengths = random.Random(3), [1, 5, 130, 260]
    masks = [[int(rng.random() < 0.7) for _ in range(n)] for n in lengths]
    kl, rewards = [[rng.random() for _ in range(n)] for n in lengths], [0.5, -2.0, 1.0, 3.0]
    found = run(rewards, masks, kl=kl, name="reinforce_plus_plus", kl_coef=0.3, gamma=0.97).returns
    for reward, kl_row, mask, row in zip(rewards, kl, masks, found, strict=True):
        last = max((t for t, m in enumerate(mask) if m), default=None)
        total, expected = 0.0, []
        for t in range(len(mask) - 1, -1, -1):
            total = -0.3 * kl_row[t] * mask[t] + (reward if t == last else 0.0) + 0.97 * total
            expected.append(total)
        torch.testing.assert_close(row, torch.tensor(expected[::-1], dtype=torch.float64))
