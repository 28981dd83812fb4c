from __future__ import annotations

from slime_testing_contracts import CommandContract


class TestCompare(CommandContract):
    component = "compare"


class TestRuns(CommandContract):
    component = "runs"


class TestShow(CommandContract):
    component = "show"


class TestExport(CommandContract):
    component = "export"


class TestResample(CommandContract):
    component = "resample"
