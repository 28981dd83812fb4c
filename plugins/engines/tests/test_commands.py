from __future__ import annotations

from slime_testing_contracts import CommandContract


class TestEngines(CommandContract):
    component = "engines"
