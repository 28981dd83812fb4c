from __future__ import annotations

from slime_core.testing import GeneratorContract


class TestSingleTurn(GeneratorContract):
    component = "single_turn"
