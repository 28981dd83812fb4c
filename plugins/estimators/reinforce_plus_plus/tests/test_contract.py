from __future__ import annotations

from slime_testing_contracts import EstimatorContract


class TestReinforcePlusPlus(EstimatorContract):
    component = "reinforce_plus_plus"
    args = {"kl_coef": 0.1, "gamma": 0.95}
    golden = [([1.0, 0.0, 2.0], [0, 0, 1], [1.0, 0.0, 2.0])]
