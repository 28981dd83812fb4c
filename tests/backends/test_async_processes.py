"""`--async` in processes: how a run ends on signals and failures, and several trainer processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Slime, TinyRun
from tests.integration.test_drain import FLAGS, SIGNALS
from tests.run_files import timeless

pytestmark = [pytest.mark.backends, pytest.mark.timeout(300)]
Argv = Callable[..., list[str]]
ROLLOUTS = 4


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "signals.py"
    path.write_text(SIGNALS)
    return path


@pytest.fixture
def slime_async(slime_ranks: Slime) -> Slime:
    """`slime train --async` with these flags, and what the functions above read from the environment."""

    def run(argv: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        return slime_ranks("train", "--async", *argv, check=False, OMP_NUM_THREADS="1", **environment)

    return run


def weights(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints" / f"rollout_{ROLLOUTS - 1:07d}" / "model.safetensors").read_bytes()


def flags(**changes: Any) -> dict[str, Any]:
    return {**FLAGS, "num_rollout": ROLLOUTS, **changes}


@pytest.fixture
def two(tiny: TinyRun, tmp_path: Path) -> Argv:
    """Flags of a run on two trainer processes."""

    def argv(save: str, **changes: Any) -> list[str]:
        own = flags(train_backend="embedded", actor_num_gpus_per_node=2, device="cpu", save_interval=1, **changes)
        return tiny.argv(tmp_path / save, **own)

    return argv


def test_two_processes_train_and_resume_as_one_run(two: Argv, tmp_path: Path, slime_async: Slime) -> None:
    whole = slime_async(two("whole"))
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert whole.stderr == ""
    assert [line["rollout/staleness/max"] for line in timeless(tmp_path / "whole")] == [0.0, 1.0, 1.0, 1.0]
    rest = slime_async(two("rest", load=tmp_path / "whole" / "checkpoints" / "rollout_0000001"))
    assert rest.returncode == 0, rest.stderr[-3000:]
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")
    assert timeless(tmp_path / "rest") == timeless(tmp_path / "whole")[2:]


def test_two_processes_end_together_on_sigterm(two: Argv, functions: Path, slime: Slime) -> None:
    """With ranks that are programs of their own, since a signal is handed on to those whose environment says so."""
    argv = two("run", rollout_sample_hook_path=f"{functions}:sampled")
    done = slime("train", "--async", *argv, check=False, OMP_NUM_THREADS="1", CALL="40", WHOM="all")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rollouts done and committed; the same command with --load" in done.stdout
