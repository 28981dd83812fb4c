from __future__ import annotations

from slime_testing_contracts import CommandContract


class TestView(CommandContract):
    component = "view"


class TestReport(CommandContract):
    component = "report"
