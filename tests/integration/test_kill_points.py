"""A few of the kill points of `tests/backends/kill`: SIGKILL, resume, and the bytes of the run that nobody killed."""

from __future__ import annotations

from pathlib import Path

from tests.backends.kill.runs import Kills
from tests.conftest import TinyRun
from tests.zygote import Zygote

POINTS = [
    "engine_step.step:begin#12",
    "commit_rename.rename:end#3",
    "metrics.slime_log_metrics:end#1",
]
"""In the middle of a rollout; between a commit and the pointer to it; between the metrics of a step and its commit.

Each but the first kills the run that resumes after the one before.
"""


def test_killed_at_an_event_and_resumed(tiny: TinyRun, tmp_path: Path, zygote: Zygote) -> None:
    kills = Kills(tiny, tmp_path, [zygote])
    events = kills.record()
    missing = [point for point in POINTS if events[point.split("#")[0]] < int(point.split("#")[1])]
    assert missing == [], "the run has not so many events of these names"
    kills.check_all([POINTS])
    assert sum(kills.done.values()) == len(POINTS)
