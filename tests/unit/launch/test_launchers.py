"""Which launcher a run gets, and what is said when it cannot be had."""

from __future__ import annotations

import pytest

from slime_core.config import Settings, load_settings
from slime_core.errors import ConfigError
from slime_core.launch import launchers
from slime_core.launch.launchers import ray_address, settle_launcher, tell_inline_only


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def _settings(*flags: str) -> Settings:
    return load_settings(flags, command="show", env={})


def test_inline_where_nothing_names_a_cluster() -> None:
    assert settle_launcher(_settings()) == "inline"


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"])
def test_ray_where_the_environment_names_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "10.0.0.1:6379")
    settings = _settings()
    assert settle_launcher(settings) == "ray"
    assert settings.args.launcher == "ray", "what actors read"
    assert ray_address(settings.args) == ("10.0.0.1:6379" if name == "RAY_ADDRESS" else "auto")


def test_ray_by_its_address() -> None:
    assert settle_launcher(_settings("--ray-address", "auto")) == "ray"


def test_torchrun_is_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert settle_launcher(_settings()) == "inline"
    with pytest.raises(ConfigError, match="leave torchrun out"):
        settle_launcher(_settings("--launcher", "ray"))


def test_an_address_without_ray() -> None:
    with pytest.raises(ConfigError, match=r"--ray-address 'auto' .* contradicts --launcher 'inline'"):
        settle_launcher(_settings("--launcher", "inline", "--ray-address", "auto"))


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "slime-rl\[ray\]"'):
        settle_launcher(_settings("--launcher", "ray"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--launcher", "ray"], "--launcher 'ray' (flag): without effect with slime rollout"),
        (["--ray-address", "auto"], "--ray-address 'auto' (flag): without effect with slime rollout"),
        (["--launcher", "inline"], ""),
    ],
)
def test_what_does_everything_here_says_so(flags: list[str], said: str, caplog: pytest.LogCaptureFixture) -> None:
    tell_inline_only(_settings(*flags), "slime rollout")
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_restarts_of_the_trainer_need_ray_and_commits() -> None:
    restarts, commits = ["--max-trainer-restarts", "2"], ["--save", "run", "--save-interval", "1"]
    with pytest.raises(ConfigError, match="only --launcher ray can restart the trainer"):
        settle_launcher(_settings(*restarts, *commits))
    with pytest.raises(ConfigError, match="a restart begins at a commit, and before the end there is none"):
        settle_launcher(_settings(*restarts, "--launcher", "ray"))
    assert settle_launcher(_settings(*restarts, *commits, "--launcher", "ray")) == "ray"
