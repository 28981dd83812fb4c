from __future__ import annotations

from slime_testing_contracts import RewardContract


class TestOverlong(RewardContract):
    component = "length_penalty"
    args = {"rollout_max_response_len": 10}
    examples = [("?", "x" * 8, "", 0.0), ("?", "x" * 9, "", -0.5), ("?", "x" * 10, "", -1.0), ("?", "x" * 99, "", -1.0)]


class TestCosine(RewardContract):
    component = "length_penalty"
    args = {"plugins": {"length_penalty": {"shape": "cosine", "target": 4}}}
    examples = [("?", "xxxx", "", 0.0), ("?", "xxxxxx", "", -0.5), ("?", "", "", -1.0), ("?", "x" * 8, "", -1.0)]
