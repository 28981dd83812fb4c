from __future__ import annotations

from slime_testing_contracts import HookContract


class TestShadows(HookContract):
    component = "shadow"
