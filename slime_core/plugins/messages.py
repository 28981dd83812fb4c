"""Messages between a run and its other processes: settings, samples, and the changes that a reward made to samples.

These processes run rewards (`workers.process`, `workers.main`), environments and the checks before a run. Messages are
pickled plain data without objects of user code. A worker returns only the changed attributes of a sample.
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
_SCALARS = (str, int, float, bool, type(None))


class WorkerArgs(SimpleNamespace):
    """The run's settings in a worker; a value that is not plain data is unpickled when it is read."""

    def __getattr__(self, name: str) -> Any:
        packed = self.__dict__.get("_packed", {})
        if name not in packed:
            if not name.startswith("_") and DEFAULTS in packed:
                try:
                    return getattr(self, DEFAULTS)(self, name)
                except LookupError:
                    pass
            raise AttributeError(f"args has no {name!r} (in a worker process of rewards)")
        if packed[name] is None:
            raise AttributeError(
                f"args.{name} cannot be sent to a worker process; declare RewardTraits(execution='thread')"
            )
        value = pickle.loads(packed[name])
        setattr(self, name, value)
        return value


def pack_args(args: Args) -> bytes:
    """Pack settings, extra attributes included, for `unpack_args`."""
    values = {**vars(args), **(getattr(args, "__pydantic_extra__", None) or {})}
    plain = {name: value for name, value in values.items() if _is_plain(value)}
    packed: dict[str, bytes | None] = {}
    for name in values.keys() - plain.keys():
        try:
            packed[name] = pickle.dumps(values[name])
        except Exception:  # a user's object may raise anything; reading the attribute in the worker raises instead
            packed[name] = None
    defaults = getattr(args, DEFAULTS, None)
    if defaults is not None:
        packed[DEFAULTS] = pickle.dumps(defaults)
    return pickle.dumps((plain, packed))


def unpack_args(data: bytes) -> Args:
    """Unpack the result of `pack_args` into a `WorkerArgs`, which has all attributes of the settings."""
    plain, packed = pickle.loads(data)
    return cast("Args", WorkerArgs(**plain, _packed=packed))


def args_changes(before: bytes, now: bytes) -> bytes:
    """Return the difference between two packed settings, for `update_args` to turn `before` into `now`."""
    parts = [
        {name: value for name, value in new.items() if name not in old or not _same(old[name], value)}
        for old, new in zip(pickle.loads(before), pickle.loads(now))
    ]
    return pickle.dumps(parts)


def update_args(args: WorkerArgs, changed: bytes) -> None:
    """Apply the changes to `args` in place, since components built in the worker may hold a reference to it."""
    plain, packed = pickle.loads(changed)
    for name in plain.keys() | packed.keys():
        vars(args).pop(name, None)
        args._packed.pop(name, None)
    vars(args).update(plain)
    args._packed.update(packed)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(_is_plain(v) for v in value)
    return type(value) in _SCALARS


_EMPTY = {
    **Sample().attributes(),
    "status": SampleStatus.PENDING.value,
    "spec_info": vars(SpecInfo()),
    "prefix_cache_info": vars(PrefixCacheInfo()),
}
_values = attrgetter(*_EMPTY)


def sample_state(sample: Sample) -> dict[str, Any]:
    """Return the attributes that differ from an empty sample's, for `restore`; a shallow `to_dict`."""
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
