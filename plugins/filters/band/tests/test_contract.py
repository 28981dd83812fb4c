from __future__ import annotations

from slime_testing_contracts import FilterContract


class TestBand(FilterContract):
    component = "band"
    examples = [
        ([0.0, 0.0, 0.0], False),
        ([1.0, 1.0], False),
        ([0.0, 1.0], True),
        ([0.5], False),
        ([None, 1.0, 0.0], True),
        ([None, None], False),
        ([1.0, 0.0, 0.0, 0.0, 0.0], True),
        ([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], False),
        ([1.0, 1.0, 1.0, 1.0, 0.0], True),
    ]
