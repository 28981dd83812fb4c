from __future__ import annotations

from slime_testing_contracts import WeightTransportContract


class TestDelta(WeightTransportContract):
    component = "delta"
