"""`.ci/pytest_again.py` on suites that pass, fail, and fail once."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import load_script

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[3] / ".ci" / "pytest_again.py"
ONCE = """
from pathlib import Path

def test_once():
    seen = Path("seen")
    first = not seen.exists()
    seen.touch()
    assert not first

def test_fine():
    pass
"""


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for a project of its own."""
    module = load_script(SCRIPT)
    (tmp_path / "flaky.md").write_text("# Flaky tests\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, path in (("ROOT", tmp_path), ("FLAKY", tmp_path / "flaky.md"), ("CACHE", tmp_path / "cache")):
        monkeypatch.setattr(module, name, path)
    return module


def test_a_test_that_fails_once_is_entered_and_fails_the_next_time(again: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(ONCE)
    options = ["-q", "-n", "2", "--dist", "loadgroup"]
    assert again.main(options) == 0
    assert "- `test_it.py::test_once`: failed on " in (tmp_path / "flaky.md").read_text()
    (tmp_path / "seen").unlink()
    assert again.main(options) == 1
    assert (tmp_path / "flaky.md").read_text().count("test_once") == 1


def test_one_that_fails_again_fails_and_other_statuses_stand(again: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_bad():\n    assert False\n")
    assert again.main(["-q"]) == 1
    assert again.main(["-q", "--no-such-option"]) == 4
    assert again.main(["-q", "-k", "nothing"]) == 5
    assert "test_bad" not in (tmp_path / "flaky.md").read_text()
