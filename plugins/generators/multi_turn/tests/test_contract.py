from __future__ import annotations

from pathlib import Path

from slime_testing_contracts import EnvironmentContract, GeneratorContract

FILE = Path(__file__).with_name("guessing.py")


class TestOneTurn(GeneratorContract):
    component = "multi_turn"
    args = {"environment_path": f"{FILE}:Once"}


class TestSeveralTurns(GeneratorContract):
    component = "multi_turn"
    script = ("1", "3", "2")
    args = {
        "environment_path": f"{FILE}:Guess",
        "plugins": {"multi_turn": {"observation_template": "<|user|>{observation}<|end|><|assistant|>"}},
    }


class TestTheEnvironment(EnvironmentContract):
    component = f"{FILE}:Remembering"
    label = "2"
    actions = ("1", "3", "2")
    ends = True
