"""Hold every component of this distribution to the contract of its kind."""

from __future__ import annotations

from slime_testing_contracts import LossReducerContract, suites

ESTIMATORS = {
    "cispo": {
        "centered": True,
        "golden": [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])],
    },
    "dapo": {
        "args": {"rollout_max_response_len": 100},
        "centered": True,
        "golden": [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])],
    },
    "dppo": {
        "args": {"plugins": {"dppo": {"divergence": "kl"}}},
        "centered": True,
        "golden": [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])],
    },
    "dr_grpo": {
        "centered": True,
        "golden": [
            ([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.5, -0.5, -0.5, 0.5]),
            ([1.0, 5.0, 0.0, 3.0], [4, 2, 4, 2], [0.5, 1.0, -0.5, -1.0]),
        ],
    },
    "gdpo": {
        "centered": True,
        "components": ("format", "answer"),
        "golden": [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])],
    },
    "gigpo": {
        "centered": True,
        "golden": [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])],
    },
    "gmpo": {
        "centered": True,
        "golden": [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])],
    },
    "grpo": {
        "centered": True,
        "golden": [
            ([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024]),
            ([1.0, 5.0, 0.0, 3.0], [4, 2, 4, 2], [0.707106, 0.707106, -0.707106, -0.707106]),
        ],
    },
    "gspo": {
        "centered": True,
        "golden": [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])],
    },
    "max_rl": {
        "centered": True,
        "golden": [
            ([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], [3.0, -1.0, -1.0, -1.0]),
            ([0.0, 1.0, 0.0, 1.0], [1, 2, 1, 2], [0.0, 0.0, 0.0, 0.0]),
        ],
    },
    "mt_grpo": {
        "centered": True,
        "golden": [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])],
    },
    "opo": {
        "centered": True,  # the suite's responses are of one length
        "golden": [([1.0, 5.0, 0.0, 3.0], [4, 2, 4, 2], [0.5, 1.0, -0.5, -1.0])],
    },
    "ppo": {
        "args": {"kl_coef": 0.1, "gamma": 0.95, "lambd": 0.9},
        "golden": [([1.0, 0.0, 2.0], [0, 0, 1], [1.0, 0.0, 2.0])],
    },
    "ppo: lambdas": {
        "args": {"kl_coef": 0.1, "gamma": 0.95, "plugins": {"ppo": {"critic_lambd": 0.9, "length_alpha": 0.5}}}
    },
    "reinforce_plus_plus": {
        "args": {"kl_coef": 0.1, "gamma": 0.95},
        "golden": [([1.0, 0.0, 2.0], [0, 0, 1], [1.0, 0.0, 2.0])],
    },
    "reinforce_plus_plus_baseline": {
        "args": {"kl_coef": 0.1},
        "centered": True,
        "golden": [([1.0, 0.0, 2.0, 0.0], [0, 1, 0, 1], [-0.5, 0.0, 0.5, 0.0])],
    },
    "remax": {"golden": [([1.0, 0.0, 0.25], [0, 0, 1], [0.75, -0.25, 0.0])]},
    "rloo": {
        "centered": True,
        "golden": [
            ([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.666667, -0.666667, -0.666667, 0.666667]),
            ([1.0, 5.0, 0.0, 3.0], [4, 2, 4, 2], [1.0, 2.0, -1.0, -2.0]),
        ],
    },
    "sapo": {
        "centered": True,
        "golden": [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])],
    },
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
