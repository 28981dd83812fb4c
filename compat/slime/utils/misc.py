"""`slime.utils.misc`: `load_function`, `SingletonMeta` and small helpers that users' functions import."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from slime import _missing
from slime.utils.http_utils import get_host_info, is_port_available

if TYPE_CHECKING:
    import torch


@functools.cache
def load_function(path: str) -> Any:
    """Return the object that a `--*-path` flag would find under `path`: `pkg.mod.fn`, `pkg.mod:fn`, `file.py:fn`.

    Calls `slime_core.resolve("functions", path)`.

    Raises:
        slime_core.errors.PluginError: The module, file or attribute does not exist, or importing it raised.
    """
    from slime_core.plugins.resolve import resolve

    return resolve("functions", path, origin="load_function").obj


class SingletonMeta(type):
    """Metaclass of singletons per process: later calls return the first instance, whatever their arguments."""

    _instances: dict[type, Any] = {}  # noqa: RUF012  # shared on purpose
    _lock = threading.RLock()

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        """Return the instance, created by the first call."""
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **keywords)
            return SingletonMeta._instances[cls]

    @staticmethod
    def clear_all_instances() -> None:
        """Forget every instance, for tests that make several runs in a process."""
        SingletonMeta._instances.clear()


class Box:
    """Container of one object (`.inner`). THUDM/slime wraps Ray references in it; slime itself does not need it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def inner(self) -> Any:
        """The object in the box."""
        return self._inner


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Return True after every `interval`-th rollout, each epoch and the last rollout; False without an interval."""
    if interval is None:
        return False
    done = rollout_id + 1
    if num_rollout is not None and done == num_rollout:
        return True
    return done % interval == 0 or (num_rollout_per_epoch is not None and done % num_rollout_per_epoch == 0)


def group_by(iterable: Iterable[Any], key: Callable[[Any], Any] | None = None) -> dict[Any, list[Any]]:
    """Return the items of each key, in order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def get_current_node_ip() -> str:
    """Return this host's address."""
    return get_host_info()[1]


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Return the first of `consecutive` free ports in a row, from `start_port` on. Raises OSError if it finds none."""
    for port in range(start_port, 65536 - consecutive + 1):
        if all(is_port_available(p) for p in itertools.islice(itertools.count(port), consecutive)):
            return port
    raise OSError(f"no {consecutive} free ports in a row from {start_port} on")


def decode_int32_meta_array(meta_info: Mapping[str, Any], keys: str | Iterable[str]) -> torch.Tensor | None:
    """Return the value of the first of `keys` that an engine's `meta_info` has, as [n] int32 on the CPU.

    The value may be base64 or bytes of little-endian int32, a tensor, an array or (nested) lists. Returns None if the
    value is missing or null.

    Raises:
        ValueError: The text is not base64, or the number of its bytes is not a multiple of an int32.
    """
    import base64

    import numpy as np
    import torch

    names = (keys,) if isinstance(keys, str) else tuple(keys)
    value = next((meta_info[name] for name in names if name in meta_info), None)
    if value is None:
        return None
    if isinstance(value, str):
        value = base64.b64decode(value, validate=True)
    if isinstance(value, bytes | bytearray | memoryview):
        return torch.from_numpy(np.frombuffer(value, dtype="<i4").copy())
    if isinstance(value, torch.Tensor):
        return value.detach().to(device="cpu", dtype=torch.int32).reshape(-1)
    return torch.tensor(np.asarray(value), dtype=torch.int32).reshape(-1)


__all__ = [
    "Box",
    "SingletonMeta",
    "decode_int32_meta_array",
    "get_current_node_ip",
    "get_free_port",
    "group_by",
    "load_function",
    "should_run_periodic_action",
]
__getattr__ = _missing.names(__name__)
