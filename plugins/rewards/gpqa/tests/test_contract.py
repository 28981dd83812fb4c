from __future__ import annotations

from slime_testing_contracts import RewardContract


class TestGpqa(RewardContract):
    component = "gpqa"
    examples = [
        ("Which?", "<think>A or B</think>The answer is (B).", "B", 1.0),
        ("Which?", "The answer is (B).", "C", 0.0),
        ("Which?", "So it must be D", "D", 1.0),
        ("Which?", "The answer is C", 2, 1.0),
        ("Which?", "it is the muon", "muon", 1.0),
    ]
