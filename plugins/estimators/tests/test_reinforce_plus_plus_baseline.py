from __future__ import annotations

import torch
from slime_estimators.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline

from slime_core import AdvantageInputs, RewardInputs
from slime_core.config import Args

ARGS = Args(kl_coef=0.1, rewards_normalization=True, eps_clip=0.2)


def test_golden_advantages() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, -0.5]),
        response_lengths=[3, 1],
        group_indices=[0, 0],
        rollout_ids=[0, 1],
        loss_masks=[torch.tensor([1.0, 1.0, 0.0]), torch.ones(1)],
        kl=[torch.tensor([0.1, 0.2, 0.3]), torch.tensor([2.0])],
    )
    result = ReinforcePlusPlusBaseline(ARGS).advantages(ARGS, inputs)
    torch.testing.assert_close(result.advantages[0], torch.tensor([0.99, 0.98, 0.97]))
    torch.testing.assert_close(result.advantages[1], torch.tensor([-0.7]))
    assert all(torch.equal(a, r) for a, r in zip(result.advantages, result.returns, strict=True))
    assert inputs.kl[0].tolist() == torch.tensor([0.1, 0.2, 0.3]).tolist()  # the logged KL is left alone


def test_the_mean_can_be_left_out() -> None:
    raw = Args(kl_coef=0.0, rewards_normalization=False)
    inputs = RewardInputs([1, 3], [0, 0], [0, 1], [5, 5], [False, False])
    assert ReinforcePlusPlusBaseline(raw).shape_rewards(raw, inputs) == [1.0, 3.0]
    assert ReinforcePlusPlusBaseline(ARGS).shape_rewards(ARGS, inputs) == [-1.0, 1.0]


def test_it_demands_and_brings_whitening() -> None:
    assert ReinforcePlusPlusBaseline.requires == ReinforcePlusPlusBaseline.defaults == {"normalize_advantages": True}
