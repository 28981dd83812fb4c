"""`slime train --launcher ray`: the same run as inline, bit for bit, and one clear line when something is wrong."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from tests.backends.conftest import CPUS
from tests.backends.ray.actors import files
from tests.backends.ray.conftest import ROLLOUTS
from tests.conftest import TinyRun
from tests.run_files import timeless

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]


def kept(run_dir: Path) -> list[str]:
    """Files of kept samples, with those of an index that nobody has closed."""
    return sorted(path.name for path in (run_dir / "samples").iterdir())


def test_same_bits_as_inline_and_one_goes_on_where_the_other_ended(
    tiny: TinyRun, inline: Path, cluster: str, typed: Any, tmp_path: Path
) -> None:
    joined, run, other = ["--ray-address", cluster], tmp_path / "run", tmp_path / "other"
    done = typed("train", *tiny.argv(run, num_rollout=ROLLOUTS), *joined)
    assert timeless(run) == timeless(inline)
    assert files(run) == files(inline)
    assert kept(run) == kept(inline), "the actors are told of the end: their last files are whole, the index is closed"
    assert "Traceback" not in done.stderr
    logs = sorted(path.name for path in (run / "actors").iterdir())
    assert logs == ["engine.log", "rollout.log", "trainer-rank-0.log"]

    shutil.copytree(inline, other)
    done = typed("train", *tiny.argv(other, load=other, num_rollout=ROLLOUTS + 1), *joined)
    assert f"continuing with rollout {ROLLOUTS + 1}" in done.stdout
    typed("train", *tiny.argv(run, load=run, num_rollout=ROLLOUTS + 1))
    assert timeless(run) == timeless(other)
    assert files(run) == files(other)


def test_a_failing_reward_ends_the_run_with_its_own_line(
    tiny: TinyRun, cluster: str, typed: Any, tmp_path: Path
) -> None:
    (tmp_path / "rm.py").write_text("def reward(args, sample, **kwargs):\n    raise OSError('no scale here')\n")
    flags = tiny.argv(
        tmp_path / "run", custom_rm_path=tmp_path / "rm.py", max_consecutive_failures=3, eval_interval=None
    )
    done = typed("train", *flags, "--ray-address", cluster, check=False)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("slime: error:")]
    assert "3 samples in a row failed (--max-consecutive-failures 3)" in line
    assert "no scale here" in line
    assert "Traceback" not in done.stderr
    assert "slime: warning: sample" in done.stderr, "warnings of the rollout actor are the command's"


def test_a_place_that_others_have(tiny: TinyRun, cluster: str, typed: Any, tmp_path: Path) -> None:
    until = time.monotonic() + 60
    while ray.available_resources().get("CPU") != CPUS:  # what ended before gives its places back in its own time
        assert time.monotonic() < until
        time.sleep(0.1)
    taken = placement_group([{"CPU": 1}] * (CPUS - 1))
    ray.get(taken.ready(), timeout=120)
    try:
        flags = [*tiny.argv(tmp_path / "run"), "--ray-address", cluster, "--ray-placement-timeout", "2"]
        done = typed("train", *flags, check=False)
    finally:
        remove_placement_group(taken)
    assert done.returncode == 2
    assert "no place for the run within 2 s (--ray-placement-timeout): it asks for 2 CPUs, 0 GPUs" in done.stderr
    assert "the cluster has 4 CPUs, 0 GPUs, of which 1 CPUs, 0 GPUs free" in done.stderr
    assert not (tmp_path / "run" / "actors").exists()


def test_a_place_that_there_is_not(tiny: TinyRun, cluster: str, typed: Any, tmp_path: Path) -> None:
    done = typed("train", *tiny.argv(tmp_path / "run", device="cuda"), "--ray-address", cluster, check=False)
    assert done.returncode == 2
    assert "the Ray cluster has no GPU (4 CPUs, 0 GPUs)" in done.stderr


def test_an_address_where_nobody_answers(tiny: TinyRun, free_port: int, typed: Any, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port}"
    done = typed("train", *tiny.argv(tmp_path / "run"), "--ray-address", address, check=False)
    assert done.returncode == 2
    assert f"--ray-address {address}: no Ray cluster answers there" in done.stderr
