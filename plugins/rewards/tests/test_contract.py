"""Hold every component of this distribution to the contract of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from slime_testing_contracts import Asked, RewardContract, ScriptedService, suites

RIGHT = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
WRONG = "```python\ndef add(a, b):\n    return a - b\n```"
NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
BOTH = {
    "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
    "kwargs": [{"keywords": None}, {"keywords": ["sea", "ship"]}],
}
TERMS = [{"reward": "exact", "weight": 1.0}, {"reward": "f1", "weight": 0.5}]

REWARDS = {
    "code": {
        "label": "assert add(1, 2) == 3",
        "examples": [
            ("add", RIGHT, "assert add(1, 2) == 3", 1.0),
            ("add", WRONG, "assert add(1, 2) == 3", 0.0),
            ("add", "def add(a, b): return a + b", "assert add(1, 2) == 3", 0.0),
            ("add", RIGHT, ["assert add(1, 2) == 3", "assert add(0, 0) == 1"], 0.0),
        ],
    },
    "dapo": {
        "examples": [
            ("1+1=", "so Answer: 2", "2", 1.0),
            ("1+1=", "so Answer: 3", "2", -1.0),
        ]
    },
    "dapo: with key": {
        "args": {"reward_key": "score"},
        "examples": [("1+1=", "Answer: 2", "2", {"score": 1.0, "acc": True, "pred": "2"})],
    },
    "deepscaler": {
        "examples": [
            ("1+1=", "<think>hm</think> so \\boxed{2}", "2", 1.0),
            ("1+1=", "<think>\\boxed{2}</think> so 2", "2", 0.0),
        ]
    },
    "exact": {
        "examples": [
            ("1+1=", "\\boxed{2}", "2", 1.0),
            ("1+1=", "\\boxed{2} no, \\boxed{3}", "2", 0.0),
            ("1+1=", "it is 2", "2", 0.0),
        ]
    },
    "f1": {
        "examples": [
            ("who?", "the brown fox", "a quick brown fox", 0.8),
            ("who?", "The Quick, brown fox!", "quick brown fox", 1.0),
            ("who?", "cat", "dog", 0.0),  # the last label is attacked, since parts of it are not paid
        ]
    },
    "gpqa": {
        "examples": [
            ("Which?", "<think>A or B</think>The answer is (B).", "B", 1.0),
            ("Which?", "The answer is (B).", "C", 0.0),
        ]
    },
    "ifbench": {
        "label": NO_COMMA,
        "examples": [
            ("write", "no comma here", NO_COMMA, 1.0),
            ("write", "a comma, here", NO_COMMA, 0.0),
            ("write", "The ship left for the sea.", BOTH, 1.0),
        ],
    },
    "length_penalty": {
        "args": {"rollout_max_response_len": 10},
        "examples": [
            ("?", "x" * 8, "", 0.0),
            ("?", "x" * 10, "", -1.0),
        ],
    },
    "length_penalty: cosine": {
        "args": {"plugins": {"length_penalty": {"shape": "cosine", "target": 4}}},
        "examples": [("?", "xxxx", "", 0.0), ("?", "xxxxxx", "", -0.5), ("?", "", "", -1.0), ("?", "x" * 8, "", -1.0)],
    },
    "weighted_sum": {
        "args": {"plugins": {"weighted_sum": {"terms": TERMS}}},
        "examples": [("1+1=", "2", "2", 1.5), ("who?", "the brown fox", "a quick brown fox", 0.4)],
    },
    "weighted_sum: mapping": {
        "args": {"plugins": {"weighted_sum": {"terms": TERMS}}, "reward_key": "score"},
        "examples": [("1+1=", "2", "2", {"score": 1.5, "exact": 1.0, "f1": 1.0})],
    },
}


def judge(asked: Asked) -> dict[str, object]:
    question = asked.body["messages"][-1]["content"]
    text = "It is right.\nScore: 10" if "-----\n2\n-----" in question else "Score: 5"
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture(scope="module")
def judge_url() -> Iterator[str]:
    with ScriptedService(judge) as running:
        yield running.url + "/v1"


class TestLlmJudge(RewardContract):
    component = "llm_judge"
    examples = [("1+1=", "2", "2", 1.0), ("1+1=", "3", "2", 0.5)]

    @pytest.fixture(autouse=True)
    def _address(self, judge_url: str) -> None:
        self.args = {"rm_timeout": 30.0, "plugins": {"llm_judge": {"url": judge_url, "model": "judge"}}}


class TestOnPolicyDistillation(RewardContract):
    component = "on_policy_distillation"
    examples = [("1+1=", "2", "2", 0.0)]

    @pytest.fixture(autouse=True)
    def _address(self, teacher: Any) -> None:
        self.args = {"rm_url": teacher.url}

    @pytest.mark.xfail(reason="what it is for: it sets sample.teacher_log_probs", strict=True)
    def test_the_sample_is_left_alone(self) -> None:
        super().test_the_sample_is_left_alone()


@pytest.fixture(scope="module")
def reward_url() -> Iterator[str]:
    with ScriptedService(lambda asked: float(asked.body["response"] == str(asked.body["label"]))) as running:
        yield running.url


class TestRemote(RewardContract):
    component = "remote"
    examples = [("1+1=", "2", "2", 1.0), ("1+1=", "3", "2", 0.0)]

    @pytest.fixture(autouse=True)
    def _address(self, reward_url: str) -> None:
        self.args = {"rm_url": reward_url, "rm_timeout": 30.0}


class TestRemoteRm(TestRemote):
    component = "remote_rm"


globals().update(suites("rewards", "slime_rewards", REWARDS, globals()))
globals().update(suites("slime.plugins", "slime_rewards", {}, globals()))
