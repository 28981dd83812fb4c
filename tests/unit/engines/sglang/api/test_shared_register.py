"""Names of dead processes are removed, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slime_engine_http.weights.shared_memory import Register, remove_leftovers

HOLDER = """
import sys
from pathlib import Path
from slime_engine_http.weights.shared_memory import Register
folder = Path(sys.argv[1])
register = Register(folder)
for name in ("first", "second"):
    (folder / name).touch()
    register.enter(name)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has entered two names."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def names(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.startswith("slime-")}


def test_a_living_process_keeps_its_names_and_a_killed_one_does_not(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "foreign").touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == {"foreign", "first", "second"}
    holder.kill()
    holder.wait()
    mine = Register(tmp_path)
    (tmp_path / "mine").touch()
    mine.enter("mine")
    assert names(tmp_path) == {"foreign", "mine"}
    remove_leftovers(tmp_path)
    assert names(tmp_path) == {"foreign", "mine"}


@pytest.mark.slow
def test_a_process_that_ends_well_leaves_no_file(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    assert len(list(tmp_path.glob("slime-*"))) == 1
    holder.communicate(timeout=30)
    assert list(tmp_path.glob("slime-*")) == []
