"""An engine's actor that is killed: brought back with --use-fault-tolerance, otherwise the clear end of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slime_runs.files import read_lines

from tests.backends.ray.actors import begun, files, struck, verified
from tests.backends.ray.conftest import ROLLOUTS
from tests.conftest import TinyRun
from tests.run_files import timeless

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]


@pytest.mark.parametrize("mode", ["synchronous", "full"])
def test_it_is_brought_back(mode: str, tiny: TinyRun, inline: Path, cluster: str, slime: Any, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"num_rollout": ROLLOUTS, "use_fault_tolerance": True}
    if mode == "full":
        flags |= {"async": True, "async_mode": "full", "update_weight_transport": "disk"}
        flags["check_weight_update_equal"] = True
    with begun(tiny, cluster, tmp_path, held=True, **flags) as run:
        before, after = struck(run, tmp_path, "engine", {"engine"})
        run.finish()
    assert {name for name in before if before[name] != after[name]} == {"engine"}
    assert "engine on " in run.said()
    assert "restart 1 of 10, with the weights that were served" in run.said()
    assert [event["event"] for event in read_lines(tmp_path / "run" / "events.jsonl")] == ["engine_restart"]
    verified(tmp_path / "run", slime, ROLLOUTS)
    assert list((tmp_path / "run" / "waits").iterdir()) == []
    if mode == "synchronous":
        assert timeless(tmp_path / "run") == timeless(inline)
        assert files(tmp_path / "run") == files(inline)
