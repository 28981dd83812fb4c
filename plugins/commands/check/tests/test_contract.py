from __future__ import annotations

from slime_testing_contracts import CommandContract


class TestCheck(CommandContract):
    component = "check"


class TestConfig(CommandContract):
    component = "config"
