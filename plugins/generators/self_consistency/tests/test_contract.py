from __future__ import annotations

from slime_testing_contracts import GeneratorContract


class TestSelfConsistency(GeneratorContract):
    component = "self_consistency"
    args = {"rm_type": "exact", "plugins": {"self_consistency": {"n": 1, "in_training": True}}}
