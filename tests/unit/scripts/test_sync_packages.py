from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def script() -> ModuleType:
    return load_script("scripts/sync_packages.py")


def checkout(root: Path, **bodies: str) -> Path:
    (root / "slime_core").mkdir()
    (root / "LICENSE").write_text("As you like it.\n")
    (root / "slime_core" / "__init__.py").write_text('__version__ = "2.3.4"\n')
    (root / "pyproject.toml").write_text(
        '[project]\ndependencies = ["numpy>=1"]\n[project.optional-dependencies]\nparquet = ["pyarrow"]\n'
    )
    for name, body in bodies.items():
        folder = root / "plugins" / "rewards" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "slime-reward-{name}"\n{body}\n'
            f'[tool.hatch.build.targets.wheel]\npackages = ["slime_reward_{name}"]\n'
        )
    return root


def test_the_files_are_in_step(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0, "run: python scripts/sync_packages.py"


def test_check_notices_a_new_plugin_and_writing_mends_it(script: ModuleType, tmp_path: Path) -> None:
    entry = '[project.entry-points."slime.rewards"]\n'
    root = checkout(
        tmp_path,
        a=f'dependencies = ["slime-rl-core", "numpy"]\n{entry}a = "slime_reward_a:reward"\n',
        b=f'[project.optional-dependencies]\nfast = ["orjson"]\n{entry}b = "slime_reward_b:reward"\n',
        math=f'{entry}math = "slime_reward_math:reward"\n[tool.slime]\npublished = true\n',
    )
    assert script.main(["--check"], root) == 1
    assert not (root / "requirements.txt").exists()
    assert script.main([], root) == 0
    lines = (root / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "torch==2.13.0",
        "-e .",
        "-e ./plugins[gguf]",
        "-e ./plugins/rewards/math",
    ]
    bundle = tomllib.loads((root / "plugins" / "pyproject.toml").read_text())
    assert bundle["project"]["dependencies"] == ["slime-rl-core==2.3.4", "slime-reward-math", "numpy"]
    assert bundle["project"]["optional-dependencies"] == {"fast": ["orjson"], "parquet": ["slime-rl-core[parquet]"]}
    assert bundle["project"]["entry-points"] == {
        "slime.rewards": {"a": "slime_reward_a:reward", "b": "slime_reward_b:reward"}
    }
    packages = bundle["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["rewards/a/slime_reward_a", "rewards/b/slime_reward_b"]
    licences = {file.parent.relative_to(root).as_posix() for file in root.rglob("LICENSE")}
    assert licences == {".", "plugins", "plugins/rewards/math"}
    assert script.main(["--check"], root) == 0


def test_a_name_that_two_folders_offer_is_refused(script: ModuleType, tmp_path: Path) -> None:
    same = dict.fromkeys("ab", '[project.entry-points."slime.rewards"]\nsame = "x:y"')
    with pytest.raises(SystemExit, match=r"rewards/b/pyproject.toml: slime.rewards has \['same'\] already"):
        script.main([], checkout(tmp_path, **same))


def test_an_editable_install_shows_the_core_alone(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
    with zipfile.ZipFile(wheel) as archive:
        (pth,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert str(ROOT) not in archive.read(pth).decode(), "the whole checkout is importable: tests, scripts, examples"
        archive.extractall(tmp_path / "site")
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import slime_core; print(slime_core.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ROOT / "slime_core/__init__.py")
