from __future__ import annotations

from slime_testing_contracts import GeneratorContract


class TestBestOfN(GeneratorContract):
    component = "best_of_n"
    args = {"rm_type": "exact", "plugins": {"best_of_n": {"n": 1, "in_training": True}}}
