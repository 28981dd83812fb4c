"""A real run is recorded, and `slime plan --trace` predicts the step time that was measured."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from slime_runs.files import read_lines

from tests.conftest import TinyRun


@pytest.mark.slow
def test_a_recorded_run_is_predicted(
    tiny: TinyRun, slime: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    slime("train", *tiny.argv(tmp_path, num_rollout=5, save_interval=3, rollout_max_response_len=24, eval_interval=3))
    events = list(read_lines(tmp_path / "trace.jsonl"))
    counts = Counter(e["e"] for e in events)
    assert (counts["run"], counts["rollout"], counts["train"], counts["push"]) == (1, 5, 5, 6)
    assert (counts["eval"], counts["save"]) == (3, 2)
    trained = [e for e in events if e["e"] == "sample" and "ev" not in e]
    assert len(trained) == 5 * 16
    assert all(e["t"][0] <= e["t"][1] <= e["t"][2] and e["n"] <= 24 for e in trained)
    shown = slime("plan", "--trace", tmp_path, "--what", "async=one-step", "--json").stdout
    trace = json.loads(shown)["trace"]
    own, one_step = trace["predictions"]
    assert own["step_seconds"] == pytest.approx(trace["measured"]["step_seconds"], rel=0.15)
    assert one_step["step_seconds"] < own["step_seconds"]
    assert one_step["staleness"]["1"] > 0.9
