from __future__ import annotations

from slime_testing_contracts import CommandContract


class TestEval(CommandContract):
    component = "eval"


class TestRollout(CommandContract):
    component = "rollout"
