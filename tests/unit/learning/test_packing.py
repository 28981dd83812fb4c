from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.config import Args
from slime_core.errors import TrainError
from slime_core.learning.packing import PackingPolicy, Schedule, build_schedule, first_fit, karmarkar_karp, split_bins
from slime_core.models.family import DecoderShape
from slime_core.sample import TrainBatch
from tests.batches import train_batch

GOLDEN_SHAPE = DecoderShape(
    hidden_size=16, intermediate_size=64, vocab_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8
)


def make_batch(lengths: list[int], rollout_ids: list[int] | None = None) -> TrainBatch:
    ids, tokens = rollout_ids or list(range(len(lengths))), [[1] * length for length in lengths]
    return train_batch([[1]] * len(lengths), tokens=tokens, rollout_ids=ids, rollout_mask_sums=[1] * len(lengths))


def counts(schedule: Schedule) -> list[list[int]]:
    """[step][rank] number of micro-batches."""
    return [[len(rank) for rank in step.micro_batches] for step in schedule.steps]


def check(schedule: Schedule, batch: TrainBatch, policy: PackingPolicy) -> None:
    """The invariants every schedule keeps."""
    for step in schedule.steps:
        assert len({len(rank) for rank in step.micro_batches}) == 1
        assert len(step.micro_batches[0]) % policy.multiple == 0
        assert all(micro_batch for rank in step.micro_batches for micro_batch in rank)
    assert sorted(i for step in schedule.steps for i in step.samples) == list(range(len(batch)))
    seen: dict[int, int] = {}
    for number, step in enumerate(schedule.steps):
        rollouts = {batch.rollout_ids[i] for i in step.samples}
        assert step.num_rollouts == len(rollouts)
        assert all(seen.setdefault(r, number) == number for r in rollouts)
    for rank in range(policy.world_size):
        share = schedule.for_rank(rank)
        flat = [p for step in share.steps for micro_batch in step for p in micro_batch]
        assert flat == list(range(len(share.indices)))
        for step, micro_batches in zip(schedule.steps, share.steps, strict=True):
            assert [[share.indices[p] for p in m] for m in micro_batches] == step.micro_batches[rank]


# -- golden numbers of THUDM/slime's scheduler -----------------------------------------------------------


def test_first_fit_and_split_golden() -> None:
    sizes = [4, 6, 3, 5, 12, 2]
    bins = first_fit(sizes, 10)
    assert bins == [[0, 1], [2, 3, 5], [4]]
    assert split_bins(bins, sizes, 5) == [[1], [3], [4], [2, 5], [0]]


def test_karmarkar_karp_golden() -> None:
    costs = [5, 8, 3, 9, 1, 7]
    assert karmarkar_karp(costs, 2, equal_size=True) == [[0, 2, 3], [1, 4, 5]]
    assert karmarkar_karp(costs, 3, equal_size=True) == [[0, 5], [1, 2], [3, 4]]


def test_flops_balance_golden() -> None:
    batch = make_batch([1, 2, 3, 4, 5, 7, 9, 10])
    policy = PackingPolicy(world_size=2, global_batch_size=8, balance=True)
    schedule = build_schedule(batch, policy, GOLDEN_SHAPE.forward_flops)
    assert [schedule.for_rank(rank).indices for rank in range(2)] == [[1, 2, 5, 6], [0, 3, 4, 7]]


@pytest.mark.parametrize(
    ("ranks", "micro_batch_size", "global_batch_size", "expected"),
    [(4, 2, 16, [2]), (2, 4, 8, [1, 1]), (2, 2, 8, [2, 2])],
)
def test_static_micro_batches(ranks: int, micro_batch_size: int, global_batch_size: int, expected: list[int]) -> None:
    policy = PackingPolicy(ranks, global_batch_size, micro_batch_size)
    batch = make_batch([3] * 16)
    schedule = build_schedule(batch, policy)
    check(schedule, batch, policy)
    assert [step[0] for step in counts(schedule)] == expected


# -- where slime drops or stops --------------------------------------------------------------------------


def test_trailing_rollouts_form_a_smaller_step() -> None:
    batch = make_batch([2] * 8, [0, 0, 1, 2, 2, 3, 4, 4])
    policy = PackingPolicy(world_size=2, global_batch_size=2)
    schedule = build_schedule(batch, policy)
    check(schedule, batch, policy)
    assert [step.num_rollouts for step in schedule.steps] == [2, 2, 1]


def test_a_trailing_step_smaller_than_the_ranks_joins_the_one_before() -> None:
    batch = make_batch([2] * 9)
    policy = PackingPolicy(world_size=2, global_batch_size=4)
    schedule = build_schedule(batch, policy)
    check(schedule, batch, policy)
    assert [step.num_rollouts for step in schedule.steps] == [4, 5]


def test_virtual_pipeline_stages_want_a_multiple() -> None:
    # 5 bins of at most 10 tokens on 2 ranks; in groups of 2 they become 8, the largest split by halves.
    batch = make_batch([9, 4, 5, 9, 6, 3, 8, 9])
    plain = PackingPolicy(world_size=2, global_batch_size=8, max_tokens=10)
    grouped = replace(plain, multiple=2)
    assert counts(build_schedule(batch, plain)) == [[3, 3]]
    schedule = build_schedule(batch, grouped)
    check(schedule, batch, grouped)
    assert counts(schedule) == [[4, 4]]
    with pytest.raises(TrainError, match=r"8 sample\(s\) .* 3 data-parallel ranks, each with 3 micro-batches at least"):
        build_schedule(batch, PackingPolicy(world_size=3, global_batch_size=8, multiple=3))


def test_processes_that_share_a_micro_batch_share_its_tokens() -> None:
    args = Args(global_batch_size=8, micro_batch_size=1, max_tokens_per_gpu=10, use_dynamic_batch_size=True)
    assert PackingPolicy.from_args(args, 2, context_parallel_size=4).max_tokens == 40
    args.use_dynamic_batch_size, args.max_tokens_per_gpu = False, None
    assert PackingPolicy.from_args(args, 2, context_parallel_size=4).max_tokens is None


# -- properties ------------------------------------------------------------------------------------------

batches = st.lists(st.tuples(st.integers(2, 40), st.integers(0, 12)), min_size=4, max_size=40)


@given(
    batches, st.integers(1, 4), st.integers(1, 6), st.sampled_from([None, 30, 64]), st.booleans(), st.booleans(),
    st.sampled_from([1, 1, 2, 3]),
)  # fmt: skip
def test_invariants(
    rows: list[tuple[int, int]], ranks: int, size: int, cap: int | None, balance: bool, flops: bool, multiple: int
) -> None:
    batch = make_batch([length for length, _ in rows], [rollout for _, rollout in rows])
    policy = PackingPolicy(ranks, size, 2, cap, balance or flops, flops and cap is not None, multiple)
    try:
        schedule = build_schedule(batch, policy, GOLDEN_SHAPE.forward_flops)
    except TrainError:
        members = [sum(r == rollout for _, r in rows) for rollout in {r for _, r in rows}]
        assert min(members) * min(size, len(members)) < ranks * multiple
        return
    check(schedule, batch, policy)
    assert schedule == build_schedule(batch, policy, GOLDEN_SHAPE.forward_flops)
    if cap is not None and not policy.balance_by_flops and ranks * multiple == 1:
        for step in schedule.steps:
            for micro_batch in step.micro_batches[0]:
                assert len(micro_batch) == 1 or sum(rows[i][0] for i in micro_batch) <= cap
