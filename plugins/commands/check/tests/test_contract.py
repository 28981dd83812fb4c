from __future__ import annotations

from slime_testing_contracts import CommandContract, HookContract


class TestCheck(CommandContract):
    component = "check"


class TestConfig(CommandContract):
    component = "config"


class TestPreflight(HookContract):
    component = "preflight"
