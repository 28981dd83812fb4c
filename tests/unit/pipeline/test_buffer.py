from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.errors import CheckpointError, PluginError, RolloutError
from slime_core.pipeline.buffer import SampleBuffer, resolve_buffer_filter
from slime_core.types import Group, Sample


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def make(filter_fn: Any = pop_first, size: int = 2) -> SampleBuffer:
    return SampleBuffer(SimpleNamespace(buffer_filter_path="mine"), size, lambda: filter_fn)


def group(index: int, size: int = 2) -> Group:
    return [Sample(group_index=index, index=index * size + i, tokens=[1, 2]) for i in range(size)]


def test_what_is_added_first_is_taken_first() -> None:
    buffer = make()
    groups = [group(i) for i in range(3)]
    buffer.add(groups)
    assert buffer.take(2) == groups[:2]
    assert buffer.take(5) == groups[2:]
    assert buffer.take(1) == []
    assert len(buffer) == 0


def test_the_filter_is_loaded_only_when_there_is_something_to_filter() -> None:
    loaded = []

    def load() -> Any:
        loaded.append(True)
        return pop_first

    buffer = SampleBuffer(SimpleNamespace(), 1, load)
    buffer.take(3)
    assert not loaded
    buffer.add([group(0, 1)])
    buffer.take(1)
    buffer.add([group(1, 1)])
    buffer.take(1)
    assert len(loaded) == 1


def test_a_group_of_another_size_is_refused_and_nothing_is_added() -> None:
    buffer = make()
    with pytest.raises(RolloutError, match="group of 3 samples; --n-samples-per-prompt is 2"):
        buffer.add([group(0), group(1, 3)])
    assert len(buffer) == 0


def test_groups_the_filter_throws_away_are_counted() -> None:
    def keep_odd(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
        odd = [g for g in buffer if g[0].group_index % 2]
        buffer[:] = odd
        return pop_first(args, rollout_id, buffer, num_samples)

    buffer = make(keep_odd)
    buffer.add([group(i) for i in range(5)])
    assert [g[0].group_index for g in buffer.take(1)] == [1]
    assert (buffer.num_dropped, len(buffer)) == (3, 1)


@pytest.mark.parametrize(
    ("filter_fn", "message"),
    [
        (lambda a, r, b, n: [b.pop(), b.pop()], "returned 2 groups; at most 1"),
        (lambda a, r, b, n: [b[0]], "without removing it"),
        (lambda a, r, b, n: [group(9)], "not in the buffer"),
    ],
)
def test_a_filter_that_breaks_its_contract_is_named(filter_fn: Any, message: str) -> None:
    buffer = make(filter_fn)
    buffer.add([group(0), group(1)])
    with pytest.raises(RolloutError, match=f"buffer filter 'mine' .*{message}"):
        buffer.take(1)


def test_state_survives_json() -> None:
    buffer = make()
    partial = group(4)
    partial[0].append_response_tokens(None, [5, 6], [-0.5, -1.0], meta_info={"finish_reason": {"type": "abort"}})
    buffer.add([partial, group(5)])
    state = json.loads(json.dumps(buffer.state_dict()))
    restored = make()
    restored.load_state_dict(state)
    assert restored.take(2) == buffer.take(2)


def test_state_of_another_group_size_is_refused() -> None:
    buffer = make()
    buffer.add([group(0)])
    with pytest.raises(CheckpointError, match="groups of 2 samples; this run has --n-samples-per-prompt 3"):
        make(size=3).load_state_dict(buffer.state_dict())


def test_a_filter_that_raises_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bf.py"
    file.write_text("def buffer_filter(args, rollout_id, buffer, num_samples):\n    return buffer[num_samples + 99]\n")
    filter_fn = resolve_buffer_filter(SimpleNamespace(buffer_filter_path=str(file)))
    buffer = make(filter_fn)
    buffer.add([group(0)])
    with pytest.raises(PluginError, match=r"--buffer-filter-path '.*bf\.py' raised IndexError.*bf\.py:2"):
        buffer.take(1)
