"""Which launcher a run gets, and what is said when it cannot be had."""

from __future__ import annotations

import pytest
from slime_commands.eval.generation import warn_inline_only
from slime_launcher_ray import plugin
from slime_launcher_ray.plugin import ray_address

from slime_core.config import Settings, load_settings
from slime_core.errors import ConfigError, PluginNotFoundError
from slime_core.launch.launchers import settle_launcher


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def _settings(*flags: str) -> Settings:
    return load_settings(flags, command="show", env={})


def _settled(*flags: str) -> str:
    settings = _settings(*flags)
    settle_launcher(settings)
    return str(settings.args.launcher)


def test_inline_where_nothing_names_a_cluster() -> None:
    assert _settled() == "inline"


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"])
def test_ray_where_the_environment_names_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "10.0.0.1:6379")
    settings = _settings()
    assert settle_launcher(settings).traits.spans_nodes
    assert settings.args.launcher == "ray", "what actors read"
    assert ray_address(settings.args) == ("10.0.0.1:6379" if name == "RAY_ADDRESS" else "auto")


def test_torchrun_is_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert _settled() == "inline"
    with pytest.raises(ConfigError, match="leave torchrun out"):
        settle_launcher(_settings("--launcher", "ray"))


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
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
    warn_inline_only(_settings(*flags), "slime rollout")
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_restarts_of_the_trainer_need_ray() -> None:
    """Commits are made every --save-minutes without --save-interval."""
    restarts = ["--max-trainer-restarts", "2"]
    with pytest.raises(ConfigError, match=r"--launcher 'inline' .* cannot restart the trainer, --launcher ray can"):
        settle_launcher(_settings(*restarts))
    assert _settled(*restarts, "--launcher", "ray") == "ray"


def test_an_address_that_no_launcher_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the core alone: it is not ignored."""
    monkeypatch.setattr("slime_core.launch.launchers._all", dict)
    with pytest.raises(ConfigError, match=r"--ray-address 'auto' .* contradicts --launcher 'inline'"):
        settle_launcher(_settings("--ray-address", "auto"))


def test_an_unknown_launcher() -> None:
    with pytest.raises(PluginNotFoundError, match=r"^--launcher 'rya' .*Did you mean 'ray'\? Installed: inline, ray"):
        settle_launcher(_settings("--launcher", "rya"))
    with pytest.raises(
        PluginNotFoundError,
        match=r"no launchers plugin 'slurm'\. One of yours has its path: FILE\.py:NAME\. Installed: inline, ray$",
    ):
        settle_launcher(_settings("--launcher", "slurm"))
