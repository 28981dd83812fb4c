from __future__ import annotations

import pytest
from slime_testing_contracts import RewardContract

RIGHT = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
WRONG = "```python\ndef add(a, b):\n    return a - b\n```"


class TestCode(RewardContract):
    component = "code"
    label = "assert add(1, 2) == 3"
    examples = [
        ("add", RIGHT, "assert add(1, 2) == 3", 1.0),
        ("add", WRONG, "assert add(1, 2) == 3", 0.0),
        ("add", "def add(a, b): return a + b", "assert add(1, 2) == 3", 0.0),
        ("add", RIGHT, ["assert add(1, 2) == 3", "assert add(0, 0) == 1"], 0.0),
    ]


@pytest.mark.slow  # the same paths; test_judge.py asks for fractions
class TestFraction(RewardContract):
    component = "code"
    label = "assert add(1, 2) == 3"
    args = {"plugins": {"code": {"score": "fraction"}}}
    examples = [("add", RIGHT, ["assert add(1, 2) == 3", "assert add(0, 0) == 1"], 0.5)]
