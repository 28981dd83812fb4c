from __future__ import annotations

from slime_testing_contracts import EstimatorContract


class TestDrGRPO(EstimatorContract):
    component = "dr_grpo"
    centered = True
    golden = [
        ([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.5, -0.5, -0.5, 0.5]),
        ([1.0, 5.0, 0.0, 3.0], [4, 2, 4, 2], [0.5, 1.0, -0.5, -1.0]),
    ]
