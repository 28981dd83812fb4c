from __future__ import annotations

from slime_buffer_fifo import buffer_filter

from slime_core import Sample


def test_oldest_first() -> None:
    groups = [[Sample(index=i)] for i in range(4)]
    buffer = list(groups)
    assert buffer_filter(None, None, buffer, 3) == groups[:3]
    assert buffer == groups[3:]
    assert buffer_filter(None, 1, buffer, -1) == []
    assert buffer == groups[3:]
