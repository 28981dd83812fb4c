from __future__ import annotations

from slime_testing_contracts import EstimatorContract


class TestReMax(EstimatorContract):
    component = "remax"
    golden = [([1.0, 0.0, 0.25], [0, 0, 1], [0.75, -0.25, 0.0])]  # the suite's baseline is 0.25
