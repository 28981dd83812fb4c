from __future__ import annotations

from slime_testing_contracts import EstimatorContract


class TestGRPO(EstimatorContract):
    component = "grpo"
    centered = True
    golden = [
        ([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], [0.866024, -0.866024, -0.866024, 0.866024]),
        ([1.0, 5.0, 0.0, 3.0], [4, 2, 4, 2], [0.707106, 0.707106, -0.707106, -0.707106]),
    ]
