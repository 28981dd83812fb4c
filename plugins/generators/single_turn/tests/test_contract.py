from __future__ import annotations

from slime_testing_contracts import GeneratorContract


class TestSingleTurn(GeneratorContract):
    component = "single_turn"
