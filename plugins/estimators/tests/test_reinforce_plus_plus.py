from __future__ import annotations

import torch
from slime_estimators.reinforce_plus_plus import ReinforcePlusPlus

from slime_core import AdvantageInputs
from slime_core.config import Args


def returns_of(
    rewards: list[float], kl: list[list[float]], masks: list[list[int]], kl_coef: float, gamma: float
) -> list[torch.Tensor]:
    args = Args(kl_coef=kl_coef, gamma=gamma, eps_clip=0.2)
    n = len(rewards)
    inputs = AdvantageInputs(
        rewards=torch.tensor(rewards),
        response_lengths=[len(mask) for mask in masks],
        group_indices=[0] * n,
        rollout_ids=list(range(n)),
        loss_masks=[torch.tensor(mask, dtype=torch.float32) for mask in masks],
        kl=[torch.tensor(row) for row in kl],
    )
    result = ReinforcePlusPlus(args).advantages(args, inputs)
    assert all(torch.equal(a, r) for a, r in zip(result.advantages, result.returns, strict=True))
    return result.returns


def test_golden_returns() -> None:
    (golden,) = returns_of([1.0], [[0.1, 0.2, 0.3]], [[1, 1, 0]], kl_coef=0.1, gamma=0.9)
    torch.testing.assert_close(golden, torch.tensor([0.872, 0.98, 0.0]))


def test_samples_of_different_length_match_a_serial_reference() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 5, 130, 260]
    kl = [torch.rand(n, generator=generator).tolist() for n in lengths]
    masks = [(torch.rand(n, generator=generator) < 0.7).int().tolist() for n in lengths]
    masks[1] = [1, 0, 1, 1, 0]
    rewards = [0.5, -2.0, 1.0, 3.0]
    found = returns_of(rewards, kl, masks, kl_coef=0.3, gamma=0.97)
    for reward, kl_row, mask, row in zip(rewards, kl, masks, found, strict=True):
        last = max((t for t, m in enumerate(mask) if m), default=None)
        total, expected = 0.0, []
        for t in range(len(mask) - 1, -1, -1):
            total = -0.3 * kl_row[t] * mask[t] + (reward if t == last else 0.0) + 0.97 * total
            expected.append(total)
        torch.testing.assert_close(row, torch.tensor(expected[::-1]), rtol=1e-5, atol=1e-5)


def test_it_demands_and_brings_whitening() -> None:
    assert ReinforcePlusPlus.requires == ReinforcePlusPlus.defaults == {"normalize_advantages": True}
