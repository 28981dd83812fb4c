"""`--offload` and `--colocate` change where memory is, and no bit of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backends.whole_runs import hold, running
from tests.conftest import SLIME, Slime, TinyRun
from tests.run_files import last_commit, timeless

FLAGS = {"num_rollout": 3, "over_sampling_batch_size": 6, "partial_rollout": True, "save_interval": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"true_on_policy_mode": True, "partial_rollout": None},
        {"train_backend": "embedded", "rollout_engine": "embedded", "actor_num_gpus_per_node": 2, "device": "cpu"},
    ],
)
def test_killed_with_colocate_and_resumed(
    tiny: TinyRun, slime_ranks: Slime, tmp_path: Path, flags: dict[str, Any]
) -> None:
    """SIGKILL after the second rollout, while the trainer's or the engine's memory is released."""
    whole, save = tmp_path / "whole", tmp_path / "run"
    flags = {**FLAGS, **flags, "num_rollout": 4}
    slime_ranks("train", *tiny.argv(whole, **flags), timeout=240)
    argv = [SLIME, "train", *tiny.argv(save, **flags, colocate=True, load=save)]
    held = ["--custom-rollout-log-function-path", hold(tmp_path, 3)]  # it stays until it is killed
    with running([*argv, *held], tmp_path, tmp_path / "log") as run:
        run.until("rollout 2")
        run.kill()
        assert run.left() == []  # the other rank ends with it
    done = slime_ranks(*argv[1:], timeout=240)
    assert "resumed from" in done.stdout
    assert timeless(save) == timeless(whole)
    assert last_commit(save) == last_commit(whole)
