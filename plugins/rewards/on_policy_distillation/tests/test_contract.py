from __future__ import annotations

from typing import Any

import pytest
from slime_testing_contracts import RewardContract


class TestOnPolicyDistillation(RewardContract):
    component = "on_policy_distillation"
    examples = [("1+1=", "2", "2", 0.0)]

    @pytest.fixture(autouse=True)
    def _address(self, teacher: Any) -> None:
        self.args = {"rm_url": teacher.url}

    @pytest.mark.xfail(reason="what it is for: it sets sample.teacher_log_probs", strict=True)
    def test_the_sample_is_left_alone(self) -> None:
        super().test_the_sample_is_left_alone()
