from __future__ import annotations

from slime_testing_contracts import RewardContract

TERMS = [{"reward": "exact", "weight": 1.0}, {"reward": "f1", "weight": 0.5}]


class TestSum(RewardContract):
    component = "weighted_sum"
    args = {"plugins": {"weighted_sum": {"terms": TERMS}}}
    examples = [("1+1=", "2", "2", 1.5), ("who?", "the brown fox", "a quick brown fox", 0.4)]


class TestMapping(RewardContract):
    component = "weighted_sum"
    args = {"plugins": {"weighted_sum": {"terms": TERMS}}, "reward_key": "score"}
    examples = [("1+1=", "2", "2", {"score": 1.5, "exact": 1.0, "f1": 1.0})]
