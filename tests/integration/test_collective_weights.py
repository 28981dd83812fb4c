"""A weight update with a trainer whose weights take all processes: whatever the engine does, none is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.backends.megatron.conftest import ranks
from tests.backends.megatron.ranks import RankPool
from tests.conftest import TinyRun

__all__ = ["ranks"]

FAILED = "the weight update failed on rank 0: WeightSyncError: "
# Case -> what rank 0 is told, how often the weights are read, and what the other rank is told.
EXPECTED: dict[str, tuple[str, int, str]] = {
    "tensor": ("served", 3, "served"),
    "disk": ("served", 3, "served"),
    "no engine": ("served", 0, "served"),
    "stops in the update": ("no more than two", 1, FAILED + "no more than two"),
    "stops in the check": ("cannot be asked", 2, FAILED + "cannot be asked"),
    "again": ("served", 3, "served"),
}


@pytest.mark.slow
def test_both_ranks_read_as_often_and_end_alike(
    ranks: Callable[[int], RankPool], tiny: TinyRun, tmp_path: Path
) -> None:
    given = {"model": str(tiny.root / "model"), "run_dir": str(tmp_path)}
    first, second = ranks(2).run("tests.integration.collective_worker:pushed", deadline=120, **given)
    for case, (at_rank_0, passes, at_rank_1) in EXPECTED.items():
        assert first[case] == [at_rank_0, passes, passes == 3 or case == "stops in the check"], case
        assert second[case][:2] == [at_rank_1, passes], case
