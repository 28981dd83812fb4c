"""How often an engine's actor is brought back, and what is said when it is not any more."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_launcher_ray.engine_restart import EngineRestart
from slime_launcher_ray.wait import EngineGone, Member
from slime_runs.files import read_lines

from slime_core.config import Args
from slime_core.errors import EngineError


async def test_no_more(tmp_path: Path) -> None:
    args = Args(rollout_max_engine_restarts=0, ray_placement_timeout=1.0)
    engine = Member("engine", None, EngineError)
    facts = {"host": "here", "pid": 1}
    restarter = EngineRestart(args, tmp_path, engine, {}, facts, several_nodes=False)
    with pytest.raises(
        EngineError, match=r"(?s)engine died.*given up after 0 restarts.*--rollout-max-engine-restarts 0"
    ):
        await restarter.again(EngineGone("engine died in generate: killed"))
    assert list(read_lines(tmp_path / "events.jsonl")) == []
