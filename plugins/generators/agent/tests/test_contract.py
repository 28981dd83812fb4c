from __future__ import annotations

from pathlib import Path

import pytest
from slime_testing_contracts import GeneratorContract

pytest.importorskip("openai")
PROGRAMS = Path(__file__).with_name("programs.py")


class TestAgent(GeneratorContract):
    component = "agent"
    plays_programs = True
    args = {"plugins": {"agent": {"program": f"{PROGRAMS}:ask"}}, "rollout_max_context_len": None}
