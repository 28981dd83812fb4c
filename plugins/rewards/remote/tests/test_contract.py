from __future__ import annotations

from collections.abc import Iterator

import pytest
from slime_testing_contracts import RewardContract, ScriptedService


@pytest.fixture(autouse=True, scope="module")
def service() -> Iterator[ScriptedService]:
    with ScriptedService(lambda asked: float(asked.body["response"] == str(asked.body["label"]))) as running:
        args = {"rm_url": running.url, "rm_timeout": 30.0}
        TestRemote.args = TestRemoteRm.args = args
        yield running


class TestRemote(RewardContract):
    component = "remote"
    examples = [("1+1=", "2", "2", 1.0), ("1+1=", "3", "2", 0.0)]


class TestRemoteRm(RewardContract):
    component = "remote_rm"
    examples = [("1+1=", "2", "2", 1.0), ("1+1=", "3", "2", 0.0)]
