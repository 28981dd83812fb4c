from __future__ import annotations

from slime_testing_contracts import GeneratorContract


class TestToolUse(GeneratorContract):
    component = "tool_use"
    script = ("<tool>12*34</tool>", "<tool>408+1</tool>", r"\boxed{409}")


class TestToolUseWithoutACall(GeneratorContract):
    component = "tool_use"
