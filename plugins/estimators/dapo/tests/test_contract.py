from __future__ import annotations

from slime_testing_contracts import EstimatorContract


class TestDAPO(EstimatorContract):
    component = "dapo"
    args = {"rollout_max_response_len": 100}
    centered = True
    golden = [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])]
