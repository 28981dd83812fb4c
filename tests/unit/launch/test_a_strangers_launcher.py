"""A launcher of a distribution that is not slime's: found, chosen, asked, run; a bad one stops only who names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_core.cli.main import main
from slime_core.config import Settings, load_settings
from slime_core.errors import ConfigError, PluginError
from slime_core.launch.launchers import launcher_traits, settle_launcher
from tests.strangers import forgotten, install

ACME = """
from slime_core import LauncherTraits

class Launcher:
    traits = LauncherTraits(variables=("ACME_JOB",), spans_nodes=True)

    def missing(self, args):
        return "" if args.seed == 1 else "acme is not installed; type: acme --install"

    def train(self, settings):
        print("trained by", settings.args.launcher)
        return {}
"""
RUN = ["--hf-checkpoint=m", "--prompt-data=d", "--num-rollout=1", "--rollout-batch-size=1", "--seed=1"]
RUN += ["--rollout-max-response-len=4", "--rm-type=exact"]


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "WORLD_SIZE", "ACME_JOB", "SLIME_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    with forgotten():
        yield


def settings(*flags: str) -> Settings:
    return load_settings([*RUN, *flags], command="train", env={})


def acme(folder: Path, source: str = ACME) -> None:
    install(folder, "acme-launcher", {"slime.launchers": {"acme": "acme_launch:Launcher"}}, acme_launch=source)


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acme(tmp_path)
    assert main(["train", *RUN, "--launcher", "acme"]) == 0
    assert capsys.readouterr().out == "trained by acme\n"


def test_chosen_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acme(tmp_path)
    monkeypatch.setenv("ACME_JOB", "7")
    given = settings()
    assert settle_launcher(given).traits is launcher_traits(given)
    assert given.cite("launcher") == "--launcher 'acme' (derived: environment variable ACME_JOB)"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match=r"both acme \(.*ACME_JOB\) and ray \(.*RAY_ADDRESS\) are meant"):
        settle_launcher(settings())
    given = settings("--ray-address", "auto")
    settle_launcher(given)
    assert given.args.launcher == "ray", "a flag is more than a variable"


def test_what_it_lacks_and_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acme(tmp_path)
    with pytest.raises(ConfigError, match=r"--launcher 'acme' \(flag\): acme is not installed; type: acme --install"):
        settle_launcher(settings("--launcher", "acme", "--seed", "2"))
    with pytest.raises(ConfigError, match=r"--launcher 'acme' \(flag\) cannot restart the trainer, --launcher ray can"):
        settle_launcher(settings("--launcher", "acme", "--max-trainer-restarts", "1"))
    with pytest.raises(ConfigError, match=r"--ray-address 'auto' \(flag\) contradicts --launcher 'acme' \(flag\)"):
        settle_launcher(settings("--launcher", "acme", "--ray-address", "auto"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="leave torchrun out"):
        settle_launcher(settings("--launcher", "acme"))


BAD = {
    "1 / 0\n": "ZeroDivisionError",
    "Launcher = 3\n": "expected a class with train",
    ACME.replace("def train(self, settings)", "def train(self)"): "expected (self, settings) -> dict",
    ACME.replace("LauncherTraits(", "dict("): "its traits are dict; write traits = LauncherTraits",
    ACME.replace("LauncherTraits(", "LauncherTraits(settings=('acme_x',), "): "'acme_x', which is no setting",
    ACME + "    def __init__(self):\n        raise OSError('no')\n": "OSError: no",
}


@pytest.mark.parametrize("source", BAD)
def test_a_bad_one_stops_only_who_names_it(source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    acme(tmp_path, source)
    given = settings()
    settle_launcher(given)
    assert given.args.launcher == "inline"
    [warning] = caplog.messages
    assert BAD[source] in warning
    assert "\n" not in warning
    with pytest.raises(PluginError) as error:
        settle_launcher(settings("--launcher", "acme"))
    assert BAD[source] in str(error.value)
    assert "acme" in str(error.value)
