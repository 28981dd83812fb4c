from __future__ import annotations

from slime_testing_contracts import RewardContract


class TestF1(RewardContract):
    component = "f1"
    examples = [
        ("who?", "the brown fox", "a quick brown fox", 0.8),
        ("who?", "The Quick, brown fox!", "quick brown fox", 1.0),
        ("really?", "yes", "Yes.", 1.0),
        ("really?", "yes it is", "yes", 0.0),
        ("really?", "no", "no way", 0.0),
        ("who?", "cat", "dog", 0.0),
    ]
