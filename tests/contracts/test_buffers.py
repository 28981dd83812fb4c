"""Whatever happens in whatever order, no buffer loses a group and none gives one out twice."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_testing_contracts.samples import scored_group

from slime_core.config import Args
from slime_core.data.buffer import SampleBuffer
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import resolve
from slime_core.sample import Group

ARGS = Args(rollout_batch_size=8, n_samples_per_prompt=2, rollout_seed=3, use_tis=True)

BUILT_IN = ("fifo", "priority", "stratified", "replay", "curriculum")

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("take"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("back"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("finish"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("resume"), st.just(0), st.booleans()),
        st.tuples(st.just("rollout"), st.just(0), st.booleans()),
    ),
    max_size=40,
)


def build(name: str) -> SampleBuffer:
    found: Any = resolve("buffers", name).obj
    return SampleBuffer(ARGS, 2, found(ARGS) if isinstance(found, type) else found)


def prompt(index: int, version: int) -> Group:
    group = scored_group([float(index % 2), float(index % 3)], group_index=index)
    for sample in group:
        sample.row = index % 5
        sample.metadata["source_name"] = "abc"[index % 3]
        sample.token_weight_versions = [version] * sample.response_length
    return group


def test_the_built_ins_are_all_here() -> None:
    assert set(BUILT_IN) <= set(current_registry().names("buffers"))


@pytest.mark.parametrize("name", BUILT_IN)
@given(operations=OPERATIONS)
def test_no_group_is_lost_or_doubled(name: str, operations: list[tuple[str, int, bool]]) -> None:
    buffer, made, rollout = build(name), 0, 0
    held: list[Group] = []  # drawn and not yet decided on
    waiting: Counter[int] = Counter()  # what the buffer must give out once more
    for operation, count, flag in operations:
        if operation == "new":
            held += [prompt(made + i, rollout) for i in range(count)]
            made += count
        elif operation == "take":
            taken = buffer.take(count)
            own = [g for g in taken if "replayed" not in g[0].metadata]
            waiting.subtract(g[0].group_index for g in own)
            assert min(waiting.values(), default=0) >= 0, "a group came that was not waiting"
            if len(own) == len(taken):
                assert len(taken) == min(count, len(taken) + sum(waiting.values())), "waiting groups were held back"
            held += taken
        elif operation == "back":
            given_back, held = held[:count], held[count:]
            buffer.add(given_back)
            waiting.update(g[0].group_index for g in given_back if "replayed" not in g[0].metadata)
        elif operation == "finish":
            finished, held = held[:count], held[count:]
            buffer.observe(finished, flag)
        elif operation == "rollout":
            rollout += 1
            buffer.begin_rollout(rollout, rollout)
        else:
            state = json.loads(json.dumps(buffer.state_dict()))
            buffer = build(name)
            buffer.load_state_dict(state)
            assert json.loads(json.dumps(buffer.state_dict())) == state
        assert len(buffer) == sum(waiting.values())
    rest: Counter[int] = Counter()
    while taken := buffer.take(3):
        rest.update(g[0].group_index for g in taken if "replayed" not in g[0].metadata)
    assert rest == +waiting
