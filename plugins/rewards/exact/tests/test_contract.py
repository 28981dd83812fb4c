from __future__ import annotations

from slime_testing_contracts import RewardContract


class TestExact(RewardContract):
    component = "exact"
    examples = [
        ("1+1=", r"\boxed{2}", "2", 1.0),
        ("1+1=", r"\boxed{3} no, \boxed{2}", 2, 1.0),
        ("1+1=", r"\boxed{2} no, \boxed{3}", "2", 0.0),
        ("1+1=", " 2\n", "2", 1.0),
        ("capital?", "PARIS", "Paris", 1.0),
        ("1+1=", "it is 2", "2", 0.0),
        ("1+1=", r"\boxed{2", "2", 0.0),
    ]
