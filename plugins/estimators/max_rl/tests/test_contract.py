from __future__ import annotations

from slime_testing_contracts import EstimatorContract


class TestMaxRL(EstimatorContract):
    component = "max_rl"
    centered = True
    golden = [
        ([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], [3.0, -1.0, -1.0, -1.0]),
        ([0.0, 1.0, 0.0, 1.0], [1, 2, 1, 2], [0.0, 0.0, 0.0, 0.0]),
    ]
