"""`slime why` of a run on a Ray cluster: driver and actors, each with what it waits for; nothing is left at the end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.backends.whole_runs import running
from tests.conftest import SLIME, TinyRun

pytestmark = [pytest.mark.backends, pytest.mark.timeout(300)]

_REWARD = """
import pathlib

def reward(args, sample, **kwargs):
    if sample.index == 0:
        pathlib.Path({pipe!r}).read_text()
    return float(len(sample.response) % 2)
"""
_DEADLINE = 200.0
_IN_ROLLOUT = "rollout: rollout 1; then: as long as the process answers"


def test_every_process_says_what_it_waits_for(tiny: TinyRun, cluster: str, slime: Any, tmp_path: Path) -> None:
    (tmp_path / "rm.py").write_text(_REWARD.format(pipe=str(tmp_path / "go")))
    os.mkfifo(tmp_path / "go")
    flags = tiny.argv(tmp_path / "run", custom_rm_path=tmp_path / "rm.py", eval_interval=None, num_rollout=1)
    with running([SLIME, "train", *flags, "--ray-address", cluster], tmp_path, tmp_path / "log") as run:
        blocks: dict[str, str] = {}
        end = time.monotonic() + _DEADLINE
        # Each process writes its board when it gets to it: for a moment the driver's may be the older one.
        while "reward" not in blocks.get("rollout", "") or _IN_ROLLOUT not in blocks.get("driver", ""):
            assert not run.ended, run.said()
            assert time.monotonic() < end, blocks
            blocks = _blocks(slime("why", tmp_path / "run", check=False).stdout)
        (tmp_path / "go").write_text("")
        run.finish()
    assert blocks.keys() == {"driver", "rollout", "trainer rank 0", "engine"}
    assert list((tmp_path / "run" / "waits").iterdir()) == []


def _blocks(table: str) -> dict[str, str]:
    """Process -> its lines."""
    found: list[str] = []
    for line in table.splitlines():
        if line.startswith(" "):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return {block.partition("  ")[0]: block for block in found}
