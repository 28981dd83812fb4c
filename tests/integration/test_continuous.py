"""`--async --async-mode full` through the command line: it learns, keeps its promises on age, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Slime, TinyRun
from tests.run_files import metrics


@pytest.mark.slow
def test_a_run_goes_on_with_the_groups_of_its_commit_in_the_other_mode(
    tiny: TinyRun, tmp_path: Path, slime: Slime
) -> None:
    save = tmp_path / "run"
    flags: dict[str, Any] = {"async": True, "save_interval": 1, "eval_interval": None, "eval_prompt_data": None}
    for rollouts, mode, step in ((3, "full", None), (5, "one-step", 1), (6, "full", 3)):
        resumed = {} if step is None else {"load": save, "ckpt_step": step}
        if step is not None:
            held = save / "checkpoints" / f"rollout_{step:07d}" / "open_groups.jsonl"
            assert held.read_text(), "generation went on beside the training"
        done = slime("train", *tiny.argv(save, **flags, **resumed, async_mode=mode, num_rollout=rollouts))
        assert ("generated ahead by a run of another mode" in done.stderr) == (step is not None)
        assert "the ledger holds" in slime("ledger", "verify", save).stdout
    assert [line["step"] for line in metrics(save)] == [1, 2, 3, 4, 5, 6]
