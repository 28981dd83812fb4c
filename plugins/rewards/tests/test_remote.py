from __future__ import annotations

import asyncio
from typing import Any

import pytest
from slime_rewards.remote import Remote, RemoteRm
from slime_testing_contracts import ScriptedService

from slime_core import RewardCaller, Sample, resolve
from slime_core.config import Args
from slime_core.errors import ConfigError, PluginError

SAMPLE = Sample(prompt=[{"role": "user", "content": "1+1="}], response="2", label=2, index=7, metadata={"k": "v"})


def args(url: str | None, name: str = "remote", **options: Any) -> Args:
    return Args(rm_url=url, rm_timeout=10.0, reward_key=None, plugins={name: options})


def test_what_is_sent_and_what_comes_back() -> None:
    with ScriptedService(lambda asked: 0.25) as service:
        assert asyncio.run(Remote(args(service.url))(args(None), SAMPLE)) == 0.25
    assert service.asked[0].body == {"prompt": SAMPLE.prompt, "response": "2", "label": 2}
    assert "authorization" not in service.asked[0].headers


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_KEY", "secret")
    with ScriptedService(lambda asked: 1) as service:
        made = RemoteRm(args(service.url, "remote_rm", api_key_env="RM_KEY", include=["metadata", "index", "status"]))
        asyncio.run(made(args(None), SAMPLE))
    asked = service.asked[0]
    assert asked.headers["authorization"] == "Bearer secret"
    assert (asked.body["metadata"], asked.body["index"], asked.body["status"]) == ({"k": "v"}, 7, "pending")


@pytest.mark.parametrize("url", [None, "", "localhost:80"])
def test_an_address_is_needed_before_the_run_starts(url: str | None) -> None:
    with pytest.raises(ConfigError, match=r"--rm-url .*: reward 'remote' asks a service; type --rm-url http://"):
        RewardCaller(resolve("rewards", "remote"), args(url))


def test_a_key_is_needed_where_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RM_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"plugins\.remote_rm\.api_key_env 'RM_KEY'.*export RM_KEY"):
        RemoteRm(args("http://x", "remote_rm", api_key_env="RM_KEY"))


def test_a_mapping_goes_with_a_key_and_anything_else_is_refused() -> None:
    with ScriptedService(lambda asked: {"score": 0.5, "why": "so"}) as service:
        settings = args(service.url)
        settings.reward_key = "score"
        caller = RewardCaller(resolve("rewards", "remote"), settings)
        assert asyncio.run(caller.score([SAMPLE])) == [{"score": 0.5, "why": "so"}]
    for odd in ("0.5", None, [1.0]):
        with ScriptedService(lambda asked, odd=odd: odd) as service:
            caller = RewardCaller(resolve("rewards", "remote"), args(service.url))
            with pytest.raises(PluginError, match="expected a number"):
                asyncio.run(caller.score([SAMPLE]))
