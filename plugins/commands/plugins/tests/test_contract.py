from __future__ import annotations

from slime_testing_contracts import CommandContract


class TestPlugins(CommandContract):
    component = "plugins"


class TestDoctor(CommandContract):
    component = "doctor"
