"""Takes the oldest groups first."""

from __future__ import annotations

from slime_core import BufferBase


class Buffer(BufferBase):
    """Groups come out in the order in which they were given back; taking k of them takes time in k."""
