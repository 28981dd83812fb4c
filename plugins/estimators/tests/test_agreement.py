"""Numbers that public implementations computed, in float64, and ours on the same inputs.

Each number is of the named repository's own function at the named commit. The table of all comparisons, with those on
random numbers, and of the differences on purpose is on the page of estimators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from slime_estimators.distillation.divergence import estimate, terms

from slime_core import AdvantageInputs, LossInputs, RewardInputs, TurnSpan, resolve
from slime_core.config import Args


def made(name: str, **settings: Any) -> tuple[Any, Args]:
    defaults = {"gamma": 1.0, "lambd": 1.0, "kl_coef": 0.0, "rewards_normalization": True, "eps_clip_c": None}
    args = Args(**defaults | {"grpo_std_normalization": True, "plugins": {}} | settings)
    return resolve("estimators", name).obj(args), args


def of_turns(name: str, rewards: Sequence[Sequence[float]], states: Sequence[str], **settings: Any) -> list[float]:
    """The advantages of all turns; the rewards' groups are 0, 0, 0, 1, 1 and 2, or of four."""
    estimator, args = made(name, **settings)
    n, lengths = len(rewards), [len(row) for row in rewards]
    groups = [0, 0, 0, 1, 1, 2] if n == 6 else [i // 4 for i in range(n)]
    turns = [[TurnSpan(k, k + 1, r, state=s) for k, (r, s) in enumerate(zip(*row))] for row in zip(rewards, states)]
    ids, zeros = (groups, list(range(n))), [torch.zeros(k, dtype=torch.float64) for k in lengths]
    given = RewardInputs([sum(row) for row in rewards], *ids, lengths, [False] * n, turns=turns)
    found = estimator.advantages(args, AdvantageInputs(
        torch.tensor(estimator.shape_rewards(args, given), dtype=torch.float64), lengths, *ids, zeros, zeros,
        turns=turns, turn_rewards=estimator.shape_turns(args, given),
    ))  # fmt: skip
    return [value for part in found.advantages for value in part.tolist()]


@pytest.mark.parametrize(
    ("std", "theirs"),
    [
        (True, [0.595216619, 0.342791273, 0.428723306, 1.433383908, 0.783522911, -2.11453256]),
        (False, [0.912333333, 0.583333333, 0.695333333, 2.180333333, 1.333333333, -3.204666667]),
    ],
)
def test_gigpo(std: bool, theirs: list[float]) -> None:
    """langfengQ/DrMAS 19c632bc, compute_gigpo_outcome_advantage; theirs gives a group of one its reward, 2."""
    rows = [[0.5, 0.0, 1.0], [0.25, 2.0], [-1.0], [1.0, 0.5], [1.0, 0.5], [2.0]]
    states = ["aba", "ac", "a", "ab", "ab", "a"]
    settings = {"gamma": 0.9, "grpo_std_normalization": std, "plugins": {"gigpo": {"step_weight": 0.7}}}
    assert of_turns("gigpo", rows, states, **settings) == pytest.approx([*theirs, *[0.0] * 5], abs=1e-8)


def test_mt_grpo() -> None:
    """SiliangZeng/Multi-Turn-RL-Agent 7dbdd08b, MTGRPOEnvTrainer, with 1e-6 in place of its 1e-4."""
    theirs = [[0.63517189, 0.208682269], [1.504435778, 1.321654439], [-1.940050483, -0.904289842],
              [-0.199557185, -0.626046836], *[[0.0, 0.0]] * 4]  # fmt: skip
    rows = [[0.5, 1.0], [0.25, 2.0], [-1.0, 0.0], [0.5, 0.25], *[[1.0, 0.5]] * 4]
    found = of_turns("mt_grpo", rows, ["ab"] * 8, plugins={"mt_grpo": {"turn_weight": 0.7}})
    assert found == pytest.approx([value for row in theirs for value in row], abs=1e-6)


def test_gdpo() -> None:
    """NVlabs/GDPO b080e63d, trl-GDPO's trainer, with 1e-6 in place of its 1e-4."""
    parts = [(1.0, 0.2), (0.0, 0.2), (0.5, 0.2), (1.0, 0.4), (2.0, 0.1), (2.0, 0.1)]
    estimator, args = made("gdpo", plugins={"gdpo": {"weights": {"a": 1.0, "b": 0.5}}})
    components = [{"a": a, "b": b} for a, b in parts]
    inputs = RewardInputs([0.0] * 6, [0, 0, 1, 1, 2, 2], list(range(6)), [5] * 6, [False] * 6, components=components)
    theirs = [0.877058649, -0.877058649, -1.315584252, 1.315584252, 0.0, 0.0]
    assert estimator.shape_rewards(args, inputs) == pytest.approx(theirs, abs=1e-8)


def test_opo() -> None:
    """verl-project/verl 1dda039b, compute_opo_outcome_advantage; theirs gives a group of one its reward, 2."""
    estimator, args = made("opo")
    lengths = [10, 30, 20, 5, 5, 7]
    inputs = RewardInputs([1.0, 0.0, 1.0, 0.5, 0.5, 2.0], [0, 0, 0, 1, 1, 2], list(range(6)), lengths, [False] * 6)
    assert estimator.shape_rewards(args, inputs) == pytest.approx([0.5, -0.5, 0.5, 0.0, 0.0, 0.0], abs=1e-8)


GMPO_RANGE = {"eps_clip": 1 - math.exp(-0.4), "eps_clip_high": math.exp(0.4) - 1}


@pytest.mark.parametrize(
    ("name", "settings", "theirs"),
    [
        # huggingface/trl f2cd5771, GRPOTrainer; the same with modelscope/ms-swift 3602360a
        ("sapo", {}, [-0.26031514, -0.108738483, -0.077734342, 0.121211566, 0.091949242, 0, 0.200573925, 0.233446616]),
        # callsys/GMPO 205b2bf4, train_zero_math_gmpo.py; the same with huggingface/trl f2cd5771
        ("gmpo", GMPO_RANGE, [0, -0.131981594, -0.131981594, 0.123469703, 0, 0, 0.191268439, 0.191268439]),
        # sail-sg/Stable-RL c6af1d11, compute_policy_loss_with_mask
        ("dppo", {}, [0, -0.111720007, -0.082764217, 0, 0, 0, 0.201074981, 0.233615798]),
        ("dppo", {"plugins": {"dppo": {"divergence": "kl"}}},
         [0, -0.111720007, -0.082764217, 0, 0, 0, 0.201074981, 0.233615798]),
    ],
)  # fmt: skip
def test_gradients_of_losses(name: str, settings: dict[str, Any], theirs: list[float]) -> None:
    """Three responses of 3, 1 and 4 tokens, one token masked; a mean over the tokens of each, then over responses."""
    estimator, args = made(name, **settings)
    old, new, mask, advantages = (torch.tensor(column, dtype=torch.float64) for column in (
        [-1.0, -0.5, -2.0, -0.3, -0.1, -3.0, -1.5, -0.7], [-0.2, -0.9, -2.7, -0.6, -0.9, -2.2, -1.6, -0.65],
        [1, 1, 1, 1, 1, 0, 1, 1], [1.5] * 3 + [-0.5] + [-2.0] * 4,
    ))  # fmt: skip
    new.requires_grad_()
    loss = estimator.policy_loss(args, LossInputs(new, old, advantages, mask, [3, 1, 4])).loss
    weights = mask / torch.tensor([3] * 3 + [1] + [3] * 4) / 3
    (gradient,) = torch.autograd.grad((loss * weights).sum(), new)
    assert gradient.tolist() == pytest.approx(theirs, abs=1e-7)


def test_lambdas_of_ppo_and_vapo() -> None:
    """verl-project/verl 1dda039b, compute_gae_advantage_return with lambda 1/3 and 0.9, before it whitens."""
    estimator, args = made("ppo", gamma=0.97, plugins={"ppo": {"critic_lambd": 0.9, "length_alpha": 0.5}})
    mask, values = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.1, 0.9, 0.3, 0.2], dtype=torch.float64)
    found = estimator.advantages(args, AdvantageInputs(
        torch.ones(1, dtype=torch.float64), [4], [0], [0], [mask], [torch.zeros(4)], values=[values]
    ))  # fmt: skip
    assert found.advantages[0][mask != 0].tolist() == pytest.approx([0.240362222, 0.152666667, 0.8], abs=1e-8)
    assert found.returns[0][mask != 0].tolist() == pytest.approx([0.8081652, 0.8924, 1.0], abs=1e-8)


@pytest.mark.parametrize(
    ("divergence", "whole", "bucket"),
    [
        ("forward_kl", 0.912556685, 0.467520883),
        ("reverse_kl", 0.939851323, 0.62555891),
        ("jsd", 0.171473714, 0.101625427),
    ],
)
def test_divergences(divergence: str, whole: float, bucket: float) -> None:
    """huggingface/trl f2cd5771, compute_divergence with alpha 0, 1 and 0.3, and add_tail_bucket over two ids."""
    policy = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]], dtype=torch.float64).log_softmax(-1)
    teacher = torch.tensor([[0.0, 1.5, 0.0, 1.0, -2.0]], dtype=torch.float64).log_softmax(-1)
    assert terms(policy, teacher, divergence, 0.3).sum().item() == pytest.approx(whole, abs=1e-8)
    zero, known = torch.zeros(1, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    found = estimate(
        policy[:, :2], teacher[:, :2], zero, zero, zero, known, torch.tensor([True]), divergence=divergence, beta=0.3,
        tail="bucket",
    )  # fmt: skip
    assert found.item() == pytest.approx(bucket, abs=1e-8)
