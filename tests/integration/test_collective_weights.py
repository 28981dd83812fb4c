"""A weight update with a trainer whose weights take all processes: whatever the engine does, none is left waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyRun
from tests.ports import free_port

WORKER = Path(__file__).with_name("collective_worker.py")
ROOT = Path(__file__).parents[2]

FAILED = "the weight update failed on rank 0: WeightSyncError: "
# Case -> what rank 0 is told, how often the weights are read, and what the other rank is told.
EXPECTED: dict[str, tuple[str, int, str]] = {
    "tensor": ("served", 3, "served"),
    "disk": ("served", 3, "served"),
    "no engine": ("served", 0, "served"),
    "stops in the update": (
        "no more than two",
        1,
        FAILED + "no more than two",
    ),
    "stops in the check": (
        "cannot be asked",
        2,
        FAILED + "cannot be asked",
    ),
    "again": ("served", 3, "served"),
}


@pytest.fixture(scope="module")
def told(tiny: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    port = str(free_port())
    command = [sys.executable, str(WORKER), str(tiny.root / "model"), str(tmp_path_factory.mktemp("run"))]
    processes = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        processes.append(process)
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "".join(errors for _, errors in said)
    return [json.loads(output) for output, _ in said]


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPECTED)
def test_both_ranks_read_as_often_and_end_alike(told: list[dict[str, Any]], case: str) -> None:
    at_rank_0, passes, at_rank_1 = EXPECTED[case]
    outcome, read, equal = told[0][case]
    assert (outcome, read) == (at_rank_0, passes)
    assert told[1][case][:2] == [at_rank_1, passes]
    assert equal == (passes == 3 or case == "stops in the check")
