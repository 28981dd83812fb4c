"""Hold every component of this distribution to the contract of its kind, and every estimator to finite numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_testing_contracts import LossReducerContract, suites

from slime_core import AdvantageInputs, LossInputs, RewardInputs, TurnSpan, resolve
from slime_core.config import load_settings
from slime_core.plugins.manager import current_registry

GRPO = {"centered": True, "golden": [([1.0, 0.0, 0.0, 1.0], [0] * 4, [0.866024, -0.866024, -0.866024, 0.866024])]}
PAIRS = ([1.0, 5.0, 0.0, 3.0], [4, 2, 4, 2])
ESTIMATORS = {
    "cispo": GRPO,
    "dapo": {"args": {"rollout_max_response_len": 100}, **GRPO},
    "dppo": {"args": {"plugins": {"dppo": {"divergence": "kl"}}}, **GRPO},
    "dr_grpo": {"centered": True, "golden": [(*PAIRS, [0.5, 1.0, -0.5, -1.0])]},
    "gdpo": {"components": ("format", "answer"), **GRPO},
    "gigpo": GRPO,
    "gmpo": GRPO,
    "grpo": GRPO,
    "gspo": GRPO,
    "max_rl": {"centered": True, "golden": [([0.0, 1.0, 0.0, 1.0], [1, 2, 1, 2], [0.0] * 4)]},
    "mt_grpo": GRPO,
    "opo": {"centered": True},  # the suite's responses are of one length
    "ppo": {"args": {"kl_coef": 0.1, "gamma": 0.95, "lambd": 0.9}},
    "ppo: lambdas": {
        "args": {"kl_coef": 0.1, "gamma": 0.95, "plugins": {"ppo": {"critic_lambd": 0.9, "length_alpha": 0.5}}}
    },
    "reinforce_plus_plus": {"args": {"kl_coef": 0.1, "gamma": 0.95}},
    "reinforce_plus_plus_baseline": {"args": {"kl_coef": 0.1}, "centered": True},
    "remax": {"golden": [([1.0, 0.0, 0.25], [0, 0, 1], [0.75, -0.25, 0.0])]},
    "rloo": {"centered": True, "golden": [(*PAIRS, [1.0, 2.0, -1.0, -2.0])]},
    "sapo": GRPO,
    # The likelihood term is no policy gradient.
    "vapo": {"args": {"plugins": {"vapo": {"positive_nll": 0.0}}}},
}
LOSSES = {
    "clip_cov": {"args": {"plugins": {"clip_cov": {"share": 0.3, "low": -0.05, "high": 1.0}}}},
    "distillation": {"args": {"plugins": {"distillation": {"divergence": "jsd"}}}},
    "kl_cov": {"args": {"plugins": {"kl_cov": {"share": 0.3}}}},
}


globals().update(suites("estimators", "slime_estimators", ESTIMATORS, globals()))
globals().update(suites("losses", "slime_estimators", LOSSES, globals()))


class TestConstant(LossReducerContract):
    component = "constant"


# -- any numbers -----------------------------------------------------------------------------------------

OWN = {n: found for n in current_registry().names("estimators")
       if (found := resolve("estimators", n).obj).__module__.startswith("slime_estimators.")}  # fmt: skip
FLAGS = ["--rollout-max-response-len", "32", "--kl-coef", "0.1", "--kl-loss-type", "k1", "--gamma", "0.9"]
OPTIONS = {"dppo": ["plugins.dppo.divergence=kl"], "ppo": ["plugins.ppo.length_alpha=0.05"]}

numbers = st.floats(-1e15, 1e15)
log_probs = st.one_of(st.floats(-1e4, 0.0), st.sampled_from([0.0, -0.0, -1e-8, -1e4]))
tokens = st.lists(st.tuples(log_probs, log_probs, st.booleans()), max_size=6)
"""New and old log-prob and mask of each token of a response."""
states = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)
responses = st.lists(st.tuples(numbers, st.integers(0, 2), st.integers(0, 1), tokens, states), min_size=1, max_size=6)
"""Reward, group, rollout within the group, tokens, state of each turn."""


def made(name: str) -> tuple[Any, Any]:
    chosen = [flag for option in OPTIONS.get(name, ()) for flag in ("--set", option)]
    args = load_settings([*FLAGS, *chosen], command="show", env={}).args
    return args, OWN[name](args)


def turns_of(reward: float, length: int, states: Sequence[str] = "ab") -> list[TurnSpan]:
    """Turns of about the same length, some empty, every second without a reward; none for no tokens."""
    ends = [length * k // len(states) for k in range(len(states) + 1)]
    rows = zip(ends, ends[1:], [None, reward / 3] * 2, states)
    return [TurnSpan(first, last, own, state=state) for first, last, own, state in rows] if length else []


@pytest.mark.parametrize("name", OWN)
def test_everything_is_finite(name: str) -> None:
    args, estimator = made(name)

    @settings(max_examples=6, deadline=None)
    @given(responses)
    def check(rows: list[tuple[float, int, int, list[tuple[float, float, bool]], list[str]]]) -> None:
        if name == "max_rl":  # refuses rewards below 0
            rows = [(abs(reward), *rest) for reward, *rest in rows]
        masks = [torch.tensor([float(m) for *_, m in own]) for *_, own, _ in rows]
        ids = ([group for _, group, *_ in rows], [2 * group + member for _, group, member, *_ in rows])
        lengths = [int(mask.sum()) for mask in masks]
        turns = [turns_of(reward, len(mask), states) for (reward, *_, states), mask in zip(rows, masks)]
        of_rollout = RewardInputs(
            [r for r, *_ in rows], *ids, lengths, [False] * len(rows), [-1.0] * len(rows), turns=turns,
            components=[{"answer": r, "tokens": float(n)} for (r, *_), n in zip(rows, lengths)],
        )  # fmt: skip
        shaped, shaped_turns = estimator.shape_rewards(args, of_rollout), estimator.shape_turns(args, of_rollout)
        assert torch.isfinite(torch.tensor(shaped)).all()
        new, old = ([torch.tensor([token[i] for token in own]) for *_, own, _ in rows] for i in (0, 1))
        inputs = AdvantageInputs(
            rewards=torch.tensor(shaped), response_lengths=[len(mask) for mask in masks], group_indices=ids[0],
            rollout_ids=ids[1], loss_masks=masks, kl=old, log_probs=old, values=new, turns=turns,
            turn_rewards=shaped_turns,
        )  # fmt: skip
        found = estimator.advantages(args, inputs)
        assert all(torch.isfinite(part).all() for part in (*found.advantages, *found.returns))
        leaf = torch.cat(new).requires_grad_()
        outputs = estimator.policy_loss(args, LossInputs(
            leaf, torch.cat(old), torch.cat(found.advantages), torch.cat(masks), inputs.response_lengths,
            returns=torch.cat(found.returns),
        ))  # fmt: skip
        assert torch.isfinite(outputs.loss).all()
        assert all(torch.isfinite(metric).all() for metric in outputs.metrics.values())
        if len(leaf):
            (gradient,) = torch.autograd.grad((outputs.loss * torch.cat(masks)).sum(), leaf)
            assert torch.isfinite(gradient).all()

    check()


@pytest.mark.parametrize("name", [name for name, made in OWN.items() if made.compares_group])
def test_nothing_to_compare_teaches_nothing(name: str) -> None:
    """A group of one; three equals, one without tokens in its first turn; three that are masked, one of them empty."""
    args, estimator = made(name)
    rewards, groups, lengths = [2.0, *[1.0] * 3, *[3.0] * 3], [0, 1, 1, 1, 2, 2, 2], [4, 4, 1, 6, 4, 4, 0]
    masks = [torch.full((n,), float(group < 2)) for n, group in zip(lengths, groups)]
    turns = [turns_of(reward, n) for reward, n in zip(rewards, lengths)]
    inputs = RewardInputs(
        rewards, groups, list(range(7)), [int(mask.sum()) for mask in masks], [False] * 7, turns=turns,
        components=[{"answer": reward / 2, "format": 1.0} for reward in rewards],
    )  # fmt: skip
    found = estimator.advantages(args, AdvantageInputs(
        rewards=torch.tensor(estimator.shape_rewards(args, inputs)), response_lengths=lengths, group_indices=groups,
        rollout_ids=inputs.rollout_ids, loss_masks=masks, kl=[torch.zeros(n) for n in lengths], turns=turns,
        turn_rewards=estimator.shape_turns(args, inputs),
    ))  # fmt: skip
    assert [len(part) for part in found.advantages] == lengths
    assert torch.cat(found.advantages).abs().max() < 1e-6
