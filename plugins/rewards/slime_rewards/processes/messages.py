"""Messages between a run and its other processes: settings, samples, and the changes that a reward made to samples.

These processes run rewards, environments and the checks before a run. Messages are pickled plain data
without objects of user code. A worker returns only the changed attributes of a sample.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast

from slime_core.protocols import Args
from slime_core.sample import PrefixCacheInfo, Sample, SampleStatus, SpecInfo
from slime_core.sample.provenance import Source, Span

DEFAULTS = "_defaults"
"""Attribute of the run's settings: a callable with fallbacks for unset attributes (`config.schema.Defaults`)."""
_LOST = "_lost"
_SCALARS = (str, int, float, bool, type(None))


class WorkerArgs(SimpleNamespace):
    """The run's settings in a worker."""

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get(_LOST, ()):
            raise AttributeError(
                f"args.{name} cannot be sent to a worker process; declare RewardTraits(execution='thread')"
            )
        if not name.startswith("_") and DEFAULTS in vars(self):
            try:
                return getattr(self, DEFAULTS)(self, name)
            except LookupError:
                pass
        raise AttributeError(f"args has no {name!r} (in a worker process of rewards)")


def pack_args(args: Args) -> bytes:
    """Pack settings, extra attributes included, for `unpack_args`; each value alone, since a user's may not pickle."""
    values = {**vars(args), **(getattr(args, "__pydantic_extra__", None) or {})}
    if (defaults := getattr(args, DEFAULTS, None)) is not None:
        values[DEFAULTS] = defaults
    return pickle.dumps({name: _pickled(value) for name, value in values.items()})


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # a user's object may raise anything; reading the attribute in the worker raises instead
        return b""


def unpack_args(data: bytes, into: WorkerArgs | None = None) -> Args:
    """Unpack the result of `pack_args`, into a new object or into one to which built components hold a reference."""
    args = WorkerArgs() if into is None else into
    lost = set()
    for name, packed in pickle.loads(data).items():
        try:
            setattr(args, name, pickle.loads(packed))
        except Exception:  # not packed, or a class that cannot be imported here
            vars(args).pop(name, None)
            lost.add(name)
    setattr(args, _LOST, lost)
    return cast("Args", args)


_EMPTY = {
    **Sample().attributes(),
    "status": SampleStatus.PENDING.value,
    "spec_info": vars(SpecInfo()),
    "prefix_cache_info": vars(PrefixCacheInfo()),
}
_values = attrgetter(*_EMPTY)


def sample_state(sample: Sample) -> dict[str, Any]:
    """Return the attributes that differ from an empty sample's, for `restore`.

    Its own classes become plain values, which pickle in a tenth of the time.
    """
    state = {n: v for (n, empty), v in zip(_EMPTY.items(), _values(sample)) if v is not empty} | vars(sample)
    state["status"] = sample.status.value
    state["spec_info"], state["prefix_cache_info"] = vars(sample.spec_info), vars(sample.prefix_cache_info)
    if sample.spans and all(type(span) is Span and type(span.source) is Source for span in sample.spans):
        state["spans"] = tuple((span.source.value, span.length, span.withheld) for span in sample.spans)
    return state


def restore(state: dict[str, Any]) -> Sample:
    """Rebuild a sample from the result of `sample_state`."""
    apply(sample := Sample(), state)
    return sample


def changes(before: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """Return the attributes that differ from `before`, a second unpickled copy of the sample's original state."""
    before, now = {**_EMPTY, **before}, {**_EMPTY, **sample_state(sample)}
    return {name: value for name, value in now.items() if name not in before or not _same(before[name], value)}


def apply(sample: Sample, changed: dict[str, Any]) -> None:
    """Set the attributes that changed in a worker."""
    for name, value in changed.items():
        setattr(sample, name, _READERS[name](value) if name in _READERS else value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "status": SampleStatus,
    "spec_info": lambda values: SpecInfo(**values),
    "prefix_cache_info": lambda values: PrefixCacheInfo(**values),
    "spans": lambda rows: [Span(Source(of), *rest) for of, *rest in rows] if type(rows) is tuple else rows,
}


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are certainly equal.

    Containers are compared in pickled form, since `==` treats 1 as True and does not work for arrays.
    """
    if type(a) is not type(b):
        return False
    return bool(a == b) if isinstance(a, _SCALARS) else pickle.dumps(a) == pickle.dumps(b)
