from __future__ import annotations

from slime_testing_contracts import RewardContract


class TestRandom(RewardContract):
    component = "random"
