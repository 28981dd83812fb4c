from __future__ import annotations

from slime_testing_contracts import CommandContract, LauncherContract


class TestRay(LauncherContract):
    component = "ray"


class TestSubmit(CommandContract):
    component = "submit"
