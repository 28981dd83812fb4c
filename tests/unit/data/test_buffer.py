from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core import BufferBase
from slime_core.config import Args
from slime_core.data.buffer import SampleBuffer, resolve_buffer
from slime_core.errors import CheckpointError, PluginError, RolloutError
from slime_core.sample import Group, Sample


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def make(filter_fn: Any = pop_first, size: int = 2) -> SampleBuffer:
    return SampleBuffer(Args(buffer_filter_path="mine"), size, filter_fn)


def group(index: int, size: int = 2) -> Group:
    return [Sample(group_index=index, index=index * size + i, tokens=[1, 2]) for i in range(size)]


def test_a_group_of_another_size_is_refused_and_nothing_is_added() -> None:
    buffer = make()
    with pytest.raises(RolloutError, match="group of 3 samples; --n-samples-per-prompt is 2"):
        buffer.add([group(0), group(1, 3)])
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("filter_fn", "message"),
    [
        (lambda a, r, b, n: [b.pop(), b.pop()], "returned 2 groups; at most 1"),
        (lambda a, r, b, n: [b[0]], "without removing it"),
        (lambda a, r, b, n: None, "returned NoneType; expected a list"),
        (lambda a, r, b, n: b.clear(), "returned NoneType; expected a list"),
        (lambda a, r, b, n: [group(9)], "not in the buffer"),
    ],
)
def test_a_filter_that_breaks_its_contract_is_named(filter_fn: Any, message: str) -> None:
    buffer = make(filter_fn)
    buffer.add([group(0), group(1)])
    with pytest.raises(RolloutError, match=f"buffer 'mine' .*{message}"):
        buffer.take(1)


def test_a_filter_that_raises_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bf.py"
    file.write_text("def buffer_filter(args, rollout_id, buffer, num_samples):\n    return buffer[num_samples + 99]\n")
    args = Args(buffer_filter_path=str(file))
    buffer = SampleBuffer(args, 2, resolve_buffer(args))
    buffer.add([group(0)])
    with pytest.raises(PluginError, match=r"--buffer-filter-path '.*bf\.py' raised IndexError.*bf\.py:2"):
        buffer.take(1)


def test_a_class_is_built_and_called(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from slime_core import BufferBase\n"
        "class Buffer(BufferBase):\n"
        "    def take(self, num_groups):\n"
        "        return [self._waiting.pop() for _ in range(min(num_groups, len(self)))]\n"
        "    def wants(self, prompt):\n"
        "        return prompt.row % 2 == self.rollout_id\n"
        "    def take_metrics(self):\n"
        "        return {'rollout/mine': 1.0}\n"
    )
    args = Args(buffer_filter_path=str(file))
    buffer = SampleBuffer(args, 2, resolve_buffer(args))
    buffer.begin_rollout(1, 5)
    groups = [group(0), group(1)]
    buffer.add(groups)
    assert [buffer.wants(Sample(row=row)) for row in range(3)] == [False, True, False]
    assert buffer.take_metrics() == {"rollout/buffer/waiting_groups": 2.0, "rollout/mine": 1.0}
    assert buffer.take(5) == groups[::-1]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda b, n: None, "returned NoneType"),
        (lambda b, n: [b._waiting[0], b._waiting[0]], "returned a group twice"),
        (lambda b, n: list(b._waiting), "returned 3 groups; at most 2"),
        (lambda b, n: [[]], "a group is a non-empty list of Samples"),
        (lambda b, n: ["abc"], "returned a str as a group"),
    ],
)
def test_a_class_that_breaks_its_contract_is_named(answer: Any, message: str) -> None:
    class Broken(BufferBase):
        def take(self, num_groups: int) -> Any:
            return answer(self, num_groups)

    buffer = make(Broken(None))
    buffer.add([group(i) for i in range(3)])
    with pytest.raises(RolloutError, match=f"buffer 'mine' .*{message}"):
        buffer.take(2)


def test_another_buffer_than_the_checkpoints_starts_anew_with_its_groups(caplog: pytest.LogCaptureFixture) -> None:
    """Two plugins may call their class alike: `Buffer` of fifo and `Buffer` of curriculum."""
    fifo, curriculum = (SampleBuffer(args, 2, resolve_buffer(args)) for args in map(_named, ("fifo", "curriculum")))
    fifo.add([group(0), group(1)])
    curriculum.load_state_dict(json.loads(json.dumps(fifo.state_dict())))
    assert "buffer is a slime_buffers.fifo.Buffer; --buffer-filter-path 'curriculum'" in caplog.text
    assert "which gets the 2 waiting groups" in caplog.text
    assert curriculum.take_metrics()["rollout/curriculum/known_prompts"] == 0
    assert [g[0].group_index for g in curriculum.take(2)] == [0, 1]


def _named(name: str) -> Args:
    return Args(buffer_filter_path=name, rollout_seed=1, plugins={})


def test_state_of_another_group_size_is_refused() -> None:
    buffer = make()
    buffer.add([group(0)])
    with pytest.raises(CheckpointError, match="groups of 2 samples; this run has --n-samples-per-prompt 3"):
        make(size=3).load_state_dict(buffer.state_dict())
