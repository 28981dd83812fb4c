"""`slime.observability`: traces of samples (`trace_utils`) and what log functions compute with (`metric_utils`)."""

from __future__ import annotations

from slime import _missing

__getattr__ = _missing.names(__name__)
