from __future__ import annotations

from slime_testing_contracts import BufferContract


class TestReplay(BufferContract):
    component = "replay"
