"""Runs in which the dynamic filter drops much, and runs with each buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slime_testing_contracts import LoopRun

FILTER = """
from slime_core import FilterDecision

def dynamic_filter(args, samples):
    return FilterDecision(samples[0].group_index % 4 == 0, "not_a_fourth")
"""


def test_or_is_filled_with_dropped_groups(run_loop: Callable[..., LoopRun], tmp_path: Path) -> None:
    path = tmp_path / "fourth.py"
    path.write_text(FILTER)
    own = {"dynamic_sampling_filter_path": path, "dynamic_sampling_budget": 2, "num_steps_per_rollout": 2}
    run = run_loop(2, **own, dynamic_sampling_on_exhausted="keep")
    assert len(run.steps) == 2
    for line in run.steps:
        assert line["rollout/dynamic_filter/drop_not_a_fourth"] == 6
        assert line["rollout/dynamic_filter/kept_exhausted"] == 2
        assert (line["rollout/groups_drawn"], line["train/steps"]) == (8, 2)
