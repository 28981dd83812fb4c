from __future__ import annotations

from slime_testing_contracts import RewardContract

NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
BOTH = {
    "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
    "kwargs": [{"keywords": None}, {"keywords": ["sea", "ship"]}],
}


class TestIfbench(RewardContract):
    component = "ifbench"
    label = NO_COMMA
    examples = [
        ("write", "no comma here", NO_COMMA, 1.0),
        ("write", "a comma, here", NO_COMMA, 0.0),
        ("write", "The ship left for the sea.", BOTH, 1.0),
        ("write", "The ship left.", BOTH, 0.0),
    ]
