from __future__ import annotations

from slime_testing_contracts import RewardContract


class TestMath(RewardContract):
    component = "math"
    examples = [
        ("1+1=", r"\boxed{2}", "2", 1.0),
        ("1+1=", r"\boxed{3}", "2", 0.0),
        ("", r"so \boxed{\frac12}", "0.5", 1.0),
        ("", r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        ("", r"\boxed{1+x}", "x+1", 1.0),
        ("", r"\boxed{\frac{2}{4}}", r"\boxed{\frac{1}{2}}", 1.0),
        ("", r"\boxed{1{,}234}", "1234", 1.0),
        ("", "The answer is $42$.", "42", 1.0),
        ("", "The answer is 41.", 42, 0.0),
    ]
