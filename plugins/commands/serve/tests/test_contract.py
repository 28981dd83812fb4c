from __future__ import annotations

from slime_core.testing import CommandContract


class TestServe(CommandContract):
    component = "serve"
