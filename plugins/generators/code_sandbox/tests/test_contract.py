from __future__ import annotations

from slime_testing_contracts import GeneratorContract


class TestCodeSandbox(GeneratorContract):
    component = "code_sandbox"
    script = ("<code>x = 12 * 34</code>", "<code>x + 1</code>", r"\boxed{409}")


class TestCodeSandboxWithoutCode(GeneratorContract):
    component = "code_sandbox"
