from __future__ import annotations

from slime_testing_contracts import RewardContract


class TestDeepscaler(RewardContract):
    component = "deepscaler"
    examples = [
        ("1+1=", r"<think>hm</think> so \boxed{2}", "2", 1.0),
        ("1+1=", r"<think>\boxed{2}</think> so 2", "2", 0.0),
        ("1+1=", r"\boxed{2}", "2", 0.0),
        ("1+1=", r"###Response \boxed{2}", r"\boxed{2}", 1.0),
        ("", r"</think>\boxed{x+1}", "1+x", 1.0),
    ]
