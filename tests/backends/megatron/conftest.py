"""Processes for tests over several ranks, kept for the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.backends.megatron.parity import Parity
from tests.backends.megatron.ranks import RankPool, end_all


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(2).run("module:function", ...)`: the pool of so many processes, made on first use."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for made in pools.values():
        made.close()
    end_all()


@pytest.fixture(scope="session")
def parity(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[[int], RankPool]) -> Parity:
    """Models and results that `test_parity_*.py` share."""
    return Parity(tmp_path_factory.mktemp("parity"), ranks)
