"""Somebody sits at a terminal: after ten seconds without output one line says what is waited for."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import SLIME, TinyRun

SLOW_RECIPE = """
import time

def recipe(args):
    time.sleep(13)
"""


@pytest.mark.slow
def test_no_silence_before_the_first_rollout(tiny: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_RECIPE)
    argv = tiny.argv(tmp_path / "run", num_rollout=2, eval_interval=2, prepare_path=f"{tmp_path}/slow.py:recipe")
    leader, follower = pty.openpty()
    process = subprocess.Popen([SLIME, "train", *argv], stdout=follower, stderr=follower)
    os.close(follower)
    said, silences, last = "", [], time.monotonic()
    while True:
        try:
            read = os.read(leader, 65536).decode(errors="replace")
        except OSError:  # its other end is closed
            break
        if "/2" not in said:
            silences.append(time.monotonic() - last)
        said, last = said + read, time.monotonic()
    os.close(leader)
    assert process.wait(60) == 0, said
    assert max(silences) < 12, silences
    told = re.findall(r"slime: starting for \d+ s", said)
    assert len(told) >= 2
    assert said.count("\r\x1b[Kslime: starting for") == len(told), "one line, which is rewritten"
    assert re.search(r"slime: starting for \d+ s: --prepare-path .*slow.py:recipe', \d s", said), said
    lines = [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).splitlines() if "reward" in line]
    assert ["held-out" in line for line in lines] == [False, True]
