"""Hold every component of this distribution to the contract of its kind."""

from __future__ import annotations

from slime_testing_contracts import suites

FILTERS = {
    "band": {
        "examples": [
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
    },
    "length": {"examples": [([0.0, 0.0], True), ([None, None], True)]},
    "nonzero_std": {
        "examples": [
            ([0.0, 0.0, 0.0], False),
            ([1.0, 1.0], False),
            ([0.0, 1.0], True),
            ([0.0, 1e-07], False),
            ([0.5], True),
            ([None, 1.0, 0.0], True),
            ([None, None], False),
        ]
    },
    "nonzero_std_with_fallback": {
        "examples": [
            ([0.0, 0.0, 0.0], False),
            ([1.0, 1.0], False),
            ([0.0, 1.0], True),
            ([0.0, 1e-07], False),
            ([0.5], True),
            ([None, 1.0, 0.0], True),
            ([None, None], False),
        ]
    },
}


globals().update(suites("filters", "slime_filters", FILTERS, globals()))
