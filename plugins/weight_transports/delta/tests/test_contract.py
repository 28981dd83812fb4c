from __future__ import annotations

from slime_core.testing import WeightTransportContract


class TestDelta(WeightTransportContract):
    component = "delta"
