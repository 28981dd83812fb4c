"""`RankPool` itself, and `ProcessGroups` over several processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from slime_trainer_megatron import cpu_mode
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.process_groups import ProcessGroups

from slime_core.errors import ConfigError
from tests.backends.megatron.ranks import RankError, RankPool

pytestmark = pytest.mark.backends

HERE = "tests.backends.megatron.test_model_ranks"


def places(layout: dict[str, Any], order: str | None = None) -> dict[str, Any]:
    groups = ProcessGroups(Layout(**layout), "cpu", **({"order": order} if order else {}))
    names = ("rank", "data_rank", "tensor_rank", "pipeline_rank", "context_rank", "expert_rank", "is_last_stage")
    return {name: getattr(groups, name) for name in names} | {
        "sum": float(groups.all_reduce(torch.tensor(10.0**groups.rank))),
        "from_first": groups.broadcast(b"hello" if groups.rank == 0 else None),
        "from_last_stage": groups.broadcast_over_pipeline(str(groups.rank).encode()),
        "tensors": groups.tensors_over_pipeline(
            {"a": torch.full((2, 3), groups.rank), "none": torch.empty(0), "b": torch.tensor(0.5, dtype=torch.bfloat16)}
            if groups.is_last_stage
            else None
        ),
    }


def refused(layout: dict[str, Any]) -> str:
    try:
        ProcessGroups(Layout(**layout), "cpu")
    except ConfigError as error:
        return str(error)
    raise AssertionError("not refused")


def fails_on(rank: int) -> None:
    groups = ProcessGroups(Layout(), "cpu")
    if groups.rank == rank:
        raise ValueError(f"rank {rank} has enough")
    groups.barrier()


def never() -> None:
    threading.Event().wait()


def waits_in_vain() -> None:
    groups = ProcessGroups(Layout(), "cpu", timeout_minutes=0.1)
    if groups.rank == 1:
        never()
    groups.barrier()


def uneven(without: str = "") -> None:
    """Rank 0 has two rows, rank 1 three; then none and one."""
    from megatron.core.tensor_parallel import mappings

    groups = ProcessGroups(Layout(tensor=2, sequence_parallel=True), "cpu", timeout_minutes=1)
    kept = [entry for entry in cpu_mode._fixes() if entry[1] != without]
    with mock.patch.object(cpu_mode, "_fixes", return_value=kept):
        for rows in ([2, 3], [0, 1], [0, 0]):
            own = torch.full((rows[groups.rank], 4), float(groups.rank + 1), requires_grad=True)
            with on_device("cpu"):
                whole = mappings.gather_from_sequence_parallel_region(own, output_split_sizes=rows)
                assert whole.tolist() == [[1.0] * 4] * rows[0] + [[2.0] * 4] * rows[1]
                (whole * whole.detach() * (groups.rank + 1)).sum().backward()
            assert own.grad is not None
            # The row's own value, once from rank 0 and twice from rank 1.
            assert own.grad.tolist() == [[3.0 * (groups.rank + 1)] * 4] * rows[groups.rank]


def test_every_rank_knows_its_place(ranks: Callable[[int], RankPool]) -> None:
    found = ranks(4).run(f"{HERE}:places", layout={"tensor": 2, "pipeline": 2})
    assert [place["tensor_rank"] for place in found] == [0, 1, 0, 1]
    assert [place["pipeline_rank"] for place in found] == [0, 0, 1, 1]
    assert [place["is_last_stage"] for place in found] == [False, False, True, True]
    assert {place["data_rank"] for place in found} == {0}
    assert [place["sum"] for place in found] == [1, 10, 100, 1000]
    assert {place["from_first"] for place in found} == {b"hello"}
    assert [place["from_last_stage"] for place in found] == [b"2", b"3", b"2", b"3"]
    for place, sender in zip(found, (2, 3, 2, 3)):
        assert place["tensors"]["a"].tolist() == [[sender] * 3] * 2
        assert place["tensors"]["none"].shape == (0,)
        assert (place["tensors"]["b"].dtype, place["tensors"]["b"].item()) == (torch.bfloat16, 0.5)


def test_data_ranks_leave_out_context_peers(ranks: Callable[[int], RankPool]) -> None:
    found = ranks(4).run(f"{HERE}:places", layout={"context": 2, "expert": 2})
    assert [place["context_rank"] for place in found] == [0, 1, 0, 1]
    assert [place["data_rank"] for place in found] == [0, 0, 1, 1]
    assert [place["sum"] for place in found] == [101, 1010, 101, 1010]


def test_the_order_of_ranks_can_be_chosen(ranks: Callable[[int], RankPool]) -> None:
    found = ranks(4).run(f"{HERE}:places", layout={"pipeline": 2}, order="tp-cp-ep-pp-dp")
    assert [place["pipeline_rank"] for place in found] == [0, 1, 0, 1]
    assert [place["data_rank"] for place in found] == [0, 0, 1, 1]


@pytest.mark.parametrize("layout", [{"tensor": 3}, {"expert": 4, "pipeline": 2}, {"tensor": 2, "expert_tensor": 3}])
def test_impossible_layouts_are_refused(ranks: Callable[[int], RankPool], layout: Any) -> None:
    assert all("4 ranks cannot hold whole copies" in said for said in ranks(4).run(f"{HERE}:refused", layout=layout))


def test_a_collective_ends_at_the_deadline(ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RankError, match=r"on rank 0 of 2:(?s:.*)barrier(?s:.*)Timed out waiting 6000ms"):
        ranks(2).run(f"{HERE}:waits_in_vain", deadline=60)


def test_uneven_rows_are_gathered(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(f"{HERE}:uneven")


def test_without_the_fix_gloo_wants_even_rows(ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RankError, match="invalid tensor size"):
        ranks(2).run(f"{HERE}:uneven", without="_gather_along_first_dim")


def test_a_failure_names_rank_and_reason_and_the_pool_goes_on(ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RankError, match=r"on rank 1 of 2:(?s:.*)ValueError: rank 1 has enough"):
        ranks(2).run(f"{HERE}:fails_on", rank=1)
    with pytest.raises(RankError, match=r"ranks \[0, 1\]"):
        ranks(2).run(f"{HERE}:never", deadline=0.2)
    assert len(ranks(2).run(f"{HERE}:places", layout={})) == 2
