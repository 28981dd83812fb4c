from __future__ import annotations

from slime_testing_contracts import CommandContract


class TestInit(CommandContract):
    component = "init"
