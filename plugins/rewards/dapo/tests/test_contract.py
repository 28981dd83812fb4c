from __future__ import annotations

from slime_testing_contracts import RewardContract


class TestDapo(RewardContract):
    component = "dapo"
    examples = [
        ("1+1=", "so Answer: 2", "2", 1.0),
        ("1+1=", "so Answer: 3", "2", -1.0),
        ("1+1=", "2", "2", -1.0),
        ("1+1=", r"Answer: \boxed{x+1}", "x+1", 1.0),
        ("capital?", "Answer: Paris", "Paris", 1.0),
    ]


class TestWithKey(RewardContract):
    component = "dapo"
    args = {"reward_key": "score"}
    examples = [("1+1=", "Answer: 2", "2", {"score": 1.0, "acc": True, "pred": "2"})]
