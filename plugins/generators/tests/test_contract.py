"""Hold every component of this distribution to the contract of its kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
from slime_testing_contracts import EnvironmentContract, GeneratorContract, suites

PROGRAMS = Path(__file__).with_name("programs.py")
FILE = Path(__file__).with_name("guessing.py")

GENERATORS = {
    "best_of_n": {"args": {"rm_type": "exact", "plugins": {"best_of_n": {"n": 1, "in_training": True}}}},
    "code_sandbox": {"script": ("<code>x = 12 * 34</code>", "<code>x + 1</code>", "\\boxed{409}")},
    "code_sandbox: without code": {},
    "multi_agent": {"args": {"plugins": {"multi_agent": {"roles": [{"name": "solver"}], "order": ["solver"]}}}},
    "multi_agent: a role that speaks twice": {
        "args": {
            "plugins": {
                "multi_agent": {
                    "roles": [{"name": "solver", "again": "Are you sure of {solver}?"}],
                    "order": ["solver", "solver"],
                }
            }
        },
        "script": ("3", "\\boxed{2}"),
    },
    "multi_turn": {"args": {"environment_path": f"{FILE}:Once"}},
    "multi_turn: several turns": {
        "script": ("1", "3", "2"),
        "args": {
            "environment_path": f"{FILE}:Guess",
            "plugins": {"multi_turn": {"observation_template": "<|user|>{observation}<|end|><|assistant|>"}},
        },
    },
    "self_consistency": {"args": {"rm_type": "exact", "plugins": {"self_consistency": {"n": 1, "in_training": True}}}},
    "tool_use": {"script": ("<tool>12*34</tool>", "<tool>408+1</tool>", "\\boxed{409}")},
    "tool_use: without a call": {},
    "verifiers": None,  # test_verifiers.py
}


@pytest.mark.skipif(find_spec("openai") is None, reason="the program uses openai")
class TestAgent(GeneratorContract):
    component = "agent"
    plays_programs = True
    args = {"plugins": {"agent": {"program": f"{PROGRAMS}:ask"}}, "rollout_max_context_len": None}


class TestTheEnvironment(EnvironmentContract):
    component = f"{FILE}:Remembering"
    label = "2"
    actions = ("1", "3", "2")
    ends = True


class TestSearch(GeneratorContract):
    component = "search"
    script = ("<search>capital of Peru</search>", "<answer>Lima</answer>")
    args: ClassVar[Mapping[str, Any]] = {"plugins": {"search": {"corpus": "corpus.jsonl"}}}

    @pytest.fixture(autouse=True)
    def _corpus(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("corpus.jsonl").write_text(json.dumps({"title": "Lima", "text": "Lima is the capital of Peru."}) + "\n")


class TestSearchWithoutAQuery(TestSearch):
    script = GeneratorContract.script


globals().update(suites("generators", "slime_generators", GENERATORS, globals()))
