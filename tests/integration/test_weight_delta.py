"""`--update-weight-mode delta` in whole runs: the same bits as weights handed over in memory, resumes, other servers.

Servers of one's own have `slime pull-weights` beside them.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slime_weight_transport_delta.apply import local_state
from slime_weight_transport_delta.format import read_version, versions_in

from slime_core.checkpoint.store import find
from tests.conftest import SLIME, Slime, TinyRun
from tests.run_files import metrics, timeless

DELTA = {"update_weight_mode": "delta", "check_weight_update_equal": True}
TIMES = ("perf/", "time", "per_sec", "update_weights", "_mfu", "tflops", "memory", "bytes")


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics that are no measurements of time."""
    return [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in timeless(run_dir)]


def weights_of(run_dir: Path) -> bytes:
    commit = find(run_dir)
    assert commit is not None
    return (commit / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def reference(tiny: TinyRun, zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with weights handed over in memory."""
    import os

    run_dir = tmp_path_factory.mktemp("reference") / "run"
    done = zygote.run(["train", *tiny.argv(run_dir, update_weight_transport="tensor")], dict(os.environ), 120)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_the_same_bits_as_in_memory(
    tiny: TinyRun, slime: Slime, tmp_path: Path, reference: Path, encoding: str
) -> None:
    run_dir = tmp_path / "run"
    slime("train", *tiny.argv(run_dir, **DELTA, update_weight_delta_encoding=encoding))
    assert weights_of(run_dir) == weights_of(reference)
    assert lines(run_dir) == lines(reference)
    rows = metrics(run_dir)
    density = [row["perf/update_weights_density"] for row in rows if "perf/update_weights_density" in row]
    assert density[-1] > 0.1
    assert all(row["perf/update_weights_wire_bytes"] > 0 for row in rows[-1:])


@pytest.mark.slow
def test_a_resumed_run_starts_a_chain_of_its_own(tiny: TinyRun, slime: Slime, tmp_path: Path, reference: Path) -> None:
    run_dir = tmp_path / "run"
    flags = {**DELTA, "update_weight_disk_keep_files": True}
    slime("train", *tiny.argv(run_dir, **flags, num_rollout=2))
    first = read_version(run_dir / "weights", 1)
    assert first.base_checkpoint == str((tiny.root / "model").resolve())
    before = list(versions_in(run_dir / "weights"))
    slime("train", *tiny.argv(run_dir, **flags, load=run_dir))
    after = list(versions_in(run_dir / "weights"))
    assert before == [1, 2, 3]
    assert after == [1, 2, 3, 4, 5]
    restarted = read_version(run_dir / "weights", 3)
    assert restarted.base_version is None
    assert restarted.base_checkpoint is None
    assert restarted.chain != first.chain
    assert weights_of(run_dir) == weights_of(reference)


@contextmanager
def process(*argv: Any, starts: str) -> Iterator[str]:
    """A command that serves; the rest of the line that says so."""
    with subprocess.Popen([SLIME, *map(str, argv)], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            assert starts in line, line
            yield line.rsplit(" ", 1)[-1].strip()
        finally:
            running.send_signal(signal.SIGTERM)
            assert running.wait(timeout=60) == 0


@pytest.mark.slow
def test_servers_of_ones_own_with_a_puller_beside_them(
    tiny: TinyRun, slime: Slime, tmp_path: Path, reference: Path
) -> None:
    run_dir, shared = tmp_path / "run", tmp_path / "shared"
    served = tmp_path / "model"
    shutil.copytree(tiny.root / "model", served)
    with (
        process("serve", "--hf-checkpoint", served, "--port", 0, "--num-threads", 1, starts="serving") as engine,
        process(
            "pull-weights", "--source", shared, "--local-dir", tmp_path / "local", "--engine-url", engine, "--port", 0,
            starts="pulling",
        ) as puller,
    ):  # fmt: skip
        flags = {
            "rollout_engine": "http", "rollout_external_engine_addrs": engine.removeprefix("http://"),
            "update_weight_puller_addrs": puller.removeprefix("http://"), "update_weight_disk_dir": shared,
        }  # fmt: skip
        slime("train", *tiny.argv(run_dir, **DELTA, **flags))
    assert weights_of(run_dir) == weights_of(reference)
    state = local_state(tmp_path / "local")
    assert state is not None
    assert state.version == max(versions_in(shared)) == 5
