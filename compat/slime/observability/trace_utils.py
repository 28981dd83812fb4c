"""`slime.observability.trace_utils`: spans and events of a sample, stored in `sample.trace`.

A dump (`--save-debug-rollout-data`) contains them in the format of THUDM/slime's viewer: `{"version", "trace_id",
"sample_id", "group_id", "attempt", "events"}`. An event is `span_start`, `span_end` or `event` with its name, time
(`ts`, seconds since 1970), ids and `attrs`. These functions are for users' functions; slime's own record of a run,
`trace.jsonl`, does not need them. A target that is no sample has no trace: its spans are no-ops.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slime import _missing
from slime_core.sample import Sample

TRACE_VERSION = 1
SGLANG_TRACE_META_KEYS = (
    "prompt_tokens", "completion_tokens", "cached_tokens", "pd_prefill_bootstrap_queue_duration",
    "pd_prefill_forward_duration", "pd_prefill_transfer_queue_duration", "pd_prefill_retry_count",
    "pd_decode_prealloc_duration", "pd_decode_transfer_duration", "pd_decode_forward_duration",
    "pd_bootstrap_duration", "pd_alloc_waiting_duration", "pd_transfer_speed_gb_s", "pd_transfer_total_mb",
)  # fmt: skip
"""Keys of an engine's `meta_info` that become attributes of a span."""
_IDS = ("trace_id", "sample_id", "group_id", "attempt")
_open: contextvars.ContextVar[tuple[tuple[str, str], ...]] = contextvars.ContextVar("slime_trace_spans", default=())
"""(trace id, span id) of this task's open spans, the innermost last."""


@dataclass
class TraceHandle:
    """A handle of a sample's trace."""

    carrier: dict[str, Any]
    """The dict `sample.trace`."""
    parent_span_id: str | None = None
    """Id of the open span in the process that exported the trace."""

    @property
    def trace_id(self) -> str:
        """Id of the trace."""
        return str(self.carrier["trace_id"])

    @property
    def sample_id(self) -> int | None:
        """`Sample.index`."""
        found: int | None = self.carrier["sample_id"]
        return found

    @property
    def group_id(self) -> int | None:
        """`Sample.group_index`."""
        found: int | None = self.carrier["group_id"]
        return found

    @property
    def attempt(self) -> int:
        """Number of times that the sample was restarted."""
        return int(self.carrier["attempt"])


Target: TypeAlias = "Sample | TraceHandle | list[Any]"


@dataclass
class TraceSpanContext:
    """An open span; attributes that are set on it are recorded at its end."""

    target: Any
    end_attrs: dict[str, Any] = field(default_factory=dict)

    def set(self, key: str, value: Any) -> TraceSpanContext:
        """Set an attribute."""
        self.end_attrs[key] = value
        return self

    def update(self, attrs: Mapping[str, Any] | None) -> TraceSpanContext:
        """Set several attributes."""
        self.end_attrs.update(attrs or {})
        return self

    set_attr = set
    update_attrs = update


def bind_trace(sample: Sample) -> TraceHandle:
    """Return the sample's trace; begin one if the sample has none."""
    carrier = getattr(sample, "trace", None)
    if carrier is None:
        carrier = _carrier()
        sample.trace = carrier  # type: ignore[attr-defined]  # extra attributes are stored, too
    carrier.update(sample_id=sample.index, group_id=sample.group_index)
    return TraceHandle(carrier)


def export_trace(handle: TraceHandle) -> dict[str, Any]:
    """Return the payload with which another process continues the trace by `import_trace`."""
    parent = handle.parent_span_id or _parent(handle.trace_id)
    return {"version": TRACE_VERSION, **{name: handle.carrier[name] for name in _IDS}, "parent_span_id": parent}


def import_trace(payload: Mapping[str, Any], carrier: dict[str, Any] | None = None) -> TraceHandle:
    """Return the trace of `payload`; its events go to `carrier` (or a new carrier), to be sent back."""
    made = _carrier() if carrier is None else {**_carrier(), **carrier}
    made.update({name: payload[name] for name in _IDS if payload.get(name) is not None})
    if carrier is not None:
        carrier.update(made)
        made = carrier
    return TraceHandle(made, payload.get("parent_span_id"))


def trace_event(target: Any, name: str, *, attrs: Mapping[str, Any] | None = None) -> None:
    """Record an event, now, of a sample or of each of several samples."""
    for handle in _handles(target):
        _append(handle, "event", name, time.time(), attrs)


@contextmanager
def trace_span(
    target: Any, name: str, *, attrs: Mapping[str, Any] | None = None, record_error: bool = True
) -> Iterator[TraceSpanContext]:
    """Record the block as a span with start and end; an exception sets `error_type` and `error_message`."""
    handles = _handles(target)
    opened = [(handle, uuid.uuid4().hex) for handle in handles]
    now = time.time()
    for handle, span_id in opened:
        parent = handle.parent_span_id or _parent(handle.trace_id)
        _append(handle, "span_start", name, now, attrs, span_id=span_id, parent_span_id=parent)
    token = _open.set((*_open.get(), *((handle.trace_id, span_id) for handle, span_id in opened)))
    span = TraceSpanContext(handles[0] if len(handles) == 1 else handles)
    try:
        yield span
    except Exception as error:
        if record_error:
            span.update({"error_type": type(error).__name__, "error_message": str(error)})
        raise
    finally:
        _open.reset(token)
        now = time.time()
        for handle, span_id in opened:
            _append(handle, "span_end", name, now, span.end_attrs, span_id=span_id)


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Any] | None = None,
    attrs_getter: Callable[..., Mapping[str, Any] | None] | None = None,
    record_error: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put every call of a function, plain or async, into a span.

    Args:
        name: Name of the span.
        target: Name of the argument that holds the sample or samples; by default the first argument that does.
        target_getter: Function that returns the sample or samples from the arguments instead.
        attrs_getter: Function that returns the attributes from the arguments.
        record_error: As in `trace_span`.

    Raises:
        ValueError: The function has no parameter `target`.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        if target is not None and target not in signature.parameters:
            raise ValueError(f"trace_function({name!r}): {function.__qualname__} has no parameter {target!r}")

        def span(args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            given = signature.bind_partial(*args, **keywords).arguments
            if target_getter is not None:
                traced = target_getter(*args, **keywords)
            elif target is not None:
                traced = given.get(target)
            else:
                traced = next((value for value in given.values() if _handles(value)), None)
            attrs = attrs_getter(*args, **keywords) if attrs_getter is not None else None
            return trace_span(traced, name, attrs=attrs, record_error=record_error)

        @functools.wraps(function)
        def plain(*args: Any, **keywords: Any) -> Any:
            with span(args, keywords):
                return function(*args, **keywords)

        @functools.wraps(function)
        async def asynchronous(*args: Any, **keywords: Any) -> Any:
            with span(args, keywords):
                return await function(*args, **keywords)

        return asynchronous if inspect.iscoroutinefunction(function) else plain

    return decorated


def trace_next_attempt(target: Any, *, attrs: Mapping[str, Any] | None = None) -> Any:
    """Record the restart of a sample: an event `attempt_start`; later events have the new attempt number."""
    for handle in _handles(target):
        handle.carrier["attempt"] += 1
        _append(handle, "event", "attempt_start", time.time(), {"attempt": handle.attempt, **(attrs or {})})
    return target


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return span attributes from an engine's `meta_info`: counts, times of prefill and decode, finish reason."""
    attrs = {key: meta[key] for key in SGLANG_TRACE_META_KEYS if meta.get(key) is not None}
    reason = meta.get("finish_reason")
    named = {
        "sglang_request_id": meta.get("id"),
        "finish_reason": reason.get("type") if isinstance(reason, Mapping) else reason,
    }
    return attrs | {key: value for key, value in named.items() if value is not None}


def _carrier() -> dict[str, Any]:
    return {
        "version": TRACE_VERSION, "trace_id": uuid.uuid4().hex, "events": [], "sample_id": None, "group_id": None,
        "attempt": 0,
    }  # fmt: skip


def _handles(target: Any) -> list[TraceHandle]:
    if isinstance(target, TraceHandle):
        return [target]
    if isinstance(target, Sample):
        return [bind_trace(target)]
    return [handle for item in target for handle in _handles(item)] if isinstance(target, list | tuple) else []


def _parent(trace_id: str) -> str | None:
    return next((span for trace, span in reversed(_open.get()) if trace == trace_id), None)


def _append(
    handle: TraceHandle, kind: str, name: str, at: float, attrs: Mapping[str, Any] | None, **span: str | None
) -> None:
    ids = {key: handle.carrier[key] for key in _IDS}
    told = {key: value for key, value in span.items() if value is not None}
    handle.carrier["events"].append(
        {"type": kind, "name": name, "ts": at, **ids, **told, **({"attrs": dict(attrs)} if attrs else {})}
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
