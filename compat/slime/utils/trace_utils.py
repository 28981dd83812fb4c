"""`slime.utils.trace_utils`: `slime.observability.trace_utils` under its older name."""

from __future__ import annotations

from slime import _missing
from slime.observability.trace_utils import (
    TraceHandle,
    TraceSpanContext,
    bind_trace,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)

__all__ = [
    "TraceHandle",
    "TraceSpanContext",
    "bind_trace",
    "build_sglang_meta_trace_attrs",
    "export_trace",
    "import_trace",
    "trace_event",
    "trace_function",
    "trace_next_attempt",
    "trace_span",
]
__getattr__ = _missing.names(__name__)
