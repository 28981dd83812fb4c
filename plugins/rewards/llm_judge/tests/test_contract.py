from __future__ import annotations

from collections.abc import Iterator

import pytest
from slime_testing_contracts import Asked, RewardContract, ScriptedService


def judge(asked: Asked) -> dict[str, object]:
    question = asked.body["messages"][-1]["content"]
    text = "It is right.\nScore: 10" if "-----\n2\n-----" in question else "Score: 5"
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture(autouse=True, scope="module")
def service() -> Iterator[ScriptedService]:
    with ScriptedService(judge) as running:
        options = {"url": running.url + "/v1", "model": "judge"}
        TestLlmJudge.args = {"rm_timeout": 30.0, "plugins": {"llm_judge": options}}
        yield running


class TestLlmJudge(RewardContract):
    component = "llm_judge"
    examples = [("1+1=", "2", "2", 1.0), ("1+1=", "3", "2", 0.5)]
