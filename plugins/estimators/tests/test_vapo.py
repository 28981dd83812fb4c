from __future__ import annotations

from typing import Any

import pytest
import torch
from slime_estimators.ppo import PPO
from slime_estimators.vapo import VAPO

from slime_core import AdvantageInputs, LossInputs
from slime_core.config import Args


def make_args(name: str, **chosen: Any) -> Args:
    return Args(
        eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, kl_coef=0.0, gamma=1.0, lambd=1.0, plugins={name: chosen}
    )


def test_advantages_are_those_of_ppo_with_the_papers_lambdas() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]), response_lengths=[40, 3], group_indices=[0, 0], rollout_ids=[0, 1],
        loss_masks=[torch.ones(40), torch.ones(3)], kl=[torch.zeros(40), torch.zeros(3)],
        values=[torch.linspace(0, 1, 40), torch.tensor([0.5, 0.4, 0.1])],
    )  # fmt: skip
    args = make_args("vapo")
    expected = PPO(make_args("ppo", critic_lambd=1.0, length_alpha=0.05)).advantages(args, inputs)
    found = VAPO(args).advantages(args, inputs)
    torch.testing.assert_close(found.advantages + found.returns, expected.advantages + expected.returns)
    torch.testing.assert_close(found.returns[0], torch.ones(40))  # with lambda 1 the shaped reward


@pytest.mark.parametrize("weight", [0.0, 0.1, 2.0])
def test_right_answers_are_imitated(weight: float) -> None:
    args = make_args("vapo", positive_nll=weight)
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    log_probs = (old + torch.tensor([0.1, -0.1, 0.05], dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([0.5, -0.5, 1.0], dtype=torch.float64)
    returns = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    inputs = LossInputs(log_probs, old, advantages, torch.ones(3), [2, 1], returns=returns)
    loss = VAPO(args).policy_loss(args, inputs).loss
    ratios = (log_probs - old).exp().tolist()
    expected = [-r * a - weight * right * p for r, a, right, p in
                zip(ratios, advantages.tolist(), [1, 1, 0], log_probs.tolist())]  # fmt: skip
    assert loss.tolist() == pytest.approx(expected, abs=1e-14)
