from __future__ import annotations

from slime_testing_contracts import EstimatorContract


class TestCISPO(EstimatorContract):
    component = "cispo"
    centered = True
    golden = [([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024])]
