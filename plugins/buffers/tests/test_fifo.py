from __future__ import annotations

from slime_buffers.fifo import Buffer

from slime_core import Sample


def test_oldest_first() -> None:
    groups = [[Sample(index=i)] for i in range(4)]
    buffer = Buffer(None)
    buffer.add(groups)
    assert buffer.take(3) == groups[:3]
    assert buffer.take(0) == []
    assert buffer.take(5) == groups[3:]
