from __future__ import annotations

from slime_testing_contracts import FilterContract


class TestNonzeroStd(FilterContract):
    component = "nonzero_std"
    examples = [
        ([0.0, 0.0, 0.0], False),
        ([1.0, 1.0], False),
        ([0.0, 1.0], True),
        ([0.0, 1e-7], False),
        ([0.5], True),
        ([None, 1.0, 0.0], True),
        ([None, None], False),
    ]
