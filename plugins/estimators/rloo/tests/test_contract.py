from __future__ import annotations

from slime_testing_contracts import EstimatorContract


class TestRLOO(EstimatorContract):
    component = "rloo"
    centered = True
    golden = [
        ([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.666667, -0.666667, -0.666667, 0.666667]),
        ([1.0, 5.0, 0.0, 3.0], [4, 2, 4, 2], [1.0, 2.0, -1.0, -2.0]),
    ]
