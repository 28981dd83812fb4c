"""`slime.utils.trace_utils`: `slime.observability.trace_utils` under its older name."""

from __future__ import annotations

from slime import _missing
from slime.observability import trace_utils
from slime.observability.trace_utils import *  # noqa: F403

__all__ = list(trace_utils.__all__)
__getattr__ = _missing.names(__name__)
