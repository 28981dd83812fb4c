from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.cli.main import main
from slime_core.plugins.manager import forget_registry


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIME_PLUGIN_DIR", "")
    path = list(sys.path)
    forget_registry()
    yield
    sys.path[:] = path
    forget_registry()


def write(directory: Path, distribution: str, name: str, body: str) -> None:
    module = "cliplug_" + distribution.replace("-", "_")
    folder = directory / distribution
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(body)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{distribution}"\nversion = "1.0"\n'
        f'[project.entry-points."slime.rewards"]\n{name} = "{module}:reward"\n'
    )


REWARD = 'def reward(args, sample):\n    """Half a point for everyone."""\n    return 0.5\n'


def test_list_is_a_table_of_where_things_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KIND", "NAME", "FROM", "TARGET"]
    (row,) = [line for line in lines if line.startswith("rewards ") and " exact " in line]
    assert "slime-reward-exact 0.1.0" in row
    assert "slime_reward_exact:reward" in row


def test_list_json_of_one_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "acme-reward", "acme", REWARD)
    assert main(["plugins", "list", "--kind", "reward", "--json", "--plugin-dir", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in rows} == {"rewards"}
    (acme,) = [row for row in rows if row["name"] == "acme"]
    assert acme["distribution"] == "acme-reward"
    assert acme["folder"] == str(tmp_path / "acme-reward")


def test_check_reports_conflicts_and_broken_plugins_which_list_survives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "acme-one", "same", REWARD)
    write(tmp_path, "acme-two", "same", REWARD)
    write(tmp_path, "acme-broken", "broken", "import nothing_of_the_sort\n")
    write(tmp_path, "acme-wrong", "wrong", "def reward(sample):\n    return 1.0\n")
    arguments = ["plugins", "list", "--kind", "rewards", "--plugin-dir", str(tmp_path)]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main([*arguments, "--check"]) == 1
    problems = capsys.readouterr().err
    assert "'same' is offered by acme-one 1.0" in problems
    assert "No module named 'nothing_of_the_sort'" in problems
    assert "found reward(sample)" in problems


def test_check_of_what_is_here_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--check"]) == 0, capsys.readouterr().err


def test_show_a_name_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "rewards/f1"]) == 0
    shown = capsys.readouterr().out
    assert "--rm-type, --custom-rm-path" in shown
    assert "slime_reward_f1/__init__.py:" in shown
    assert "SQuAD" in shown
    file = tmp_path / "my_rm.py"
    file.write_text(REWARD)
    assert main(["plugins", "show", f"rewards:{file}"]) == 0
    shown = capsys.readouterr().out
    assert f"{file}:1" in shown
    assert "Half a point for everyone." in shown


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("rewards/exakt", "Did you mean 'exact'?"),
        ("rewads/exact", "Did you mean 'rewards'?"),
        ("exact", "write KIND/NAME or KIND:SPEC"),
    ],
)
def test_show_explains_a_wrong_name(component: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", component]) == 2
    assert message in capsys.readouterr().err


def test_list_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom slime_core.cli.main import main\nassert main(['plugins', 'list']) == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'transformers', 'math_verify', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, which a busy machine does not stretch as it does wall time.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
