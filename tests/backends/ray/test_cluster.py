"""The local cluster that a run starts: tried once more, and without what lies in the working directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

WHERE = """
import ray
from slime_core.config import Args
from slime_launcher_ray import session

@ray.remote
def where():
    import colorsys, wave
    return [colorsys.__file__, wave.__file__]
"""
NO_DAEMON_AT_FIRST = """
start, starts = session._Daemon.start, []

def failing(self, command, env, **streams):
    starts.append(command)
    return start(self, command if len(starts) > 1 else ["false"], env, **streams)

session._Daemon.start = failing
"""
CONNECT = """
with session.connected(Args()):
    print("found:", *ray.get(where.remote()))
"""


def cluster(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """By a script that lies elsewhere and does not have the working directory on its path, as `slime`'s own."""
    script = directory / "bin" / "script.py"
    script.parent.mkdir()
    script.write_text(WHERE + code + CONNECT)
    command = [sys.executable, "-P", str(script)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)


def test_what_lies_in_the_working_directory_is_not_imported_by_its_processes(tmp_path: Path) -> None:
    for name in ("colorsys.py", "wave.py"):
        (tmp_path / name).write_text("raise SystemExit('a stranger')\n")
    done = cluster("", tmp_path)
    assert done.returncode == 0, done.stderr
    found = done.stdout.partition("found: ")[2].split()
    assert len(found) == 2
    assert not any(place.startswith(str(tmp_path)) for place in found)


def test_one_that_does_not_come_up_is_started_once_more(tmp_path: Path) -> None:
    done = cluster(NO_DAEMON_AT_FIRST, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a local Ray cluster did not come up, and is started once more" in done.stderr
    assert "found: " in done.stdout
