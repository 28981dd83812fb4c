from __future__ import annotations

from slime_testing_contracts import EstimatorContract


class TestReinforcePlusPlusBaseline(EstimatorContract):
    component = "reinforce_plus_plus_baseline"
    args = {"kl_coef": 0.1}
    centered = True
    golden = [([1.0, 0.0, 2.0, 0.0], [0, 1, 0, 1], [-0.5, 0.0, 0.5, 0.0])]
