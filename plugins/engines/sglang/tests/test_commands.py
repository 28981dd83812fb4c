from __future__ import annotations

from slime_core.testing import CommandContract


class TestEngines(CommandContract):
    component = "engines"
