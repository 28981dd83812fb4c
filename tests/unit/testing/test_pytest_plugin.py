"""Contract suites by command line, from a folder with nothing but the component."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime_testing_contracts import pytest_plugin

REWARDS = """
def good(args, sample):
    return float(sample.response.strip() == str(sample.label))

def scaled(args, sample):
    return float(args.scale) * args.plugins["my_rm"]["factor"]

def bad(args, sample):
    return float(len(sample.label))
"""


@pytest.fixture
def contracts(tmp_path: Path, program: Callable[..., Any]) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "my_rm.py").write_text(REWARDS)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        suites = ("--pyargs", "slime_testing_contracts.components")
        return program("pytest", "-q", "-p", "no:cacheprovider", *suites, *words, cwd=tmp_path)

    return run


@pytest.mark.slow
def test_good_and_bad_ones_with_settings(
    tmp_path: Path, contracts: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "filter.py").write_text("def dynamic_filter(args, samples):\n    samples.pop()\n    return True\n")
    words = ["rewards:./my_rm.py:good", "rewards:my_rm.py:scaled", "reward:./my_rm.py:bad", "filters:no_such"]
    named = [word for spec in [*words, "filters:filter.py"] for word in ("--slime-component", spec)]
    done = contracts(*named, "--slime-args", "scale=0.5", "--slime-args", "plugins.my_rm.factor=2")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert not any("my_rm_py_good" in line or "my_rm_py_scaled" in line for line in failed), done.stdout
    assert sum("rewards_my_rm_py_bad::test_another_label_is_read_or_refused" in line for line in failed) == 5
    assert "for the response '2' with the label None it raised TypeError" in done.stdout
    assert 1 <= done.stdout.count("no filters plugin 'no_such'") <= 2, (
        "a component that cannot be loaded is one failure"
    )
    assert "Right contains one more item" in done.stdout, "asserts of the suites are rewritten"
    assert "name what to test: --slime-component rewards:./my_rm.py:reward" in contracts().stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slime-component", "rewads:x"], "Did you mean 'rewards'?"),
        (["--slime-component", "rewards"], "write KIND:SPEC"),
        (["--slime-component", "rewards:math", "--slime-args", "scale"], "write KEY=VALUE"),
        (["--slime-component", "rewards:math", "--slime-args", "a=1", "--slime-args", "a.b=1"], "has a value already"),
        (["--slime-args", "a=1"], "there is none"),
    ],
)
def test_wrong_options_are_errors_of_usage(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = pytest.Parser(_ispytest=True)
    pytest_plugin.pytest_addoption(parser)
    options = parser.parse_known_args(words)

    class Config:
        invocation_params = pytest.Config.InvocationParams(args=words, plugins=None, dir=Path.cwd())

        def getoption(self, name: str) -> list[str]:
            found: list[str] = getattr(options, name[2:].replace("-", "_"))
            return found

    monkeypatch.setattr(pytest_plugin._Asked, "components", ())
    with pytest.raises(pytest.UsageError) as raised:
        pytest_plugin.pytest_configure(Config())  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_other_peoples_runs_load_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n\ndef test_light(request):\n"
        "    assert request.config.pluginmanager.hasplugin('slime_testing_contracts.pytest_plugin')\n"
        "    heavy = {'torch', 'numpy', 'transformers', 'pydantic', 'yaml', 'slime_core.plugins.resolve'}\n"
        "    assert not heavy & sys.modules.keys()\n"
    )
    # Other plugins of this environment, hypothesis among them, may load numpy; slime's is under test.
    plugins = ("-p", "slime_testing_contracts.pytest_plugin", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", *plugins]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
