from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sync_requirements", ROOT / "scripts" / "sync_requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_in_step(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0, "run: python scripts/sync_requirements.py"


def test_check_notices_a_new_plugin_and_writing_mends_it(script: ModuleType, tmp_path: Path) -> None:
    for name in ("rewards/b", "buffers/a"):
        (tmp_path / "plugins" / name).mkdir(parents=True)
        (tmp_path / "plugins" / name / "pyproject.toml").touch()
    (tmp_path / "compat").mkdir()
    (tmp_path / "compat" / "pyproject.toml").touch()
    assert script.main(["--check"], tmp_path) == 1
    assert not (tmp_path / "requirements-dev.txt").exists()
    assert script.main([], tmp_path) == 0
    lines = (tmp_path / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "torch==2.13.0",
        "-e .",
        "-e ./compat",
        "-e ./plugins/buffers/a",
        "-e ./plugins/rewards/b",
    ]
    assert script.main(["--check"], tmp_path) == 0


def test_the_extra_names_every_plugin(script: ModuleType, tmp_path: Path) -> None:
    for name in ("plugins/rewards/b", "plugins/buffers/a", "compat"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "pyproject.toml").write_text(f'[project]\nname = "slime-{name[-1]}"\n')
    text = '[project.optional-dependencies]\nplugins = [\n    "old",\n]\ndev = ["pytest"]\n'
    (tmp_path / "pyproject.toml").write_text(text)
    assert script.main(["--check"], tmp_path) == 1
    assert script.main([], tmp_path) == 0
    expected = text.replace('    "old",\n', '    "slime-a",\n    "slime-b",\n')
    assert (tmp_path / "pyproject.toml").read_text() == expected
    assert script.main(["--check"], tmp_path) == 0
