from __future__ import annotations

from slime_testing_contracts import FilterContract


class TestLength(FilterContract):
    component = "length"
    examples = [
        ([0.0, 0.0], True),
        ([None, None], True),
    ]
