"""Every place inside SGLang that slime's plugin reads or replaces; no other file of it touches what is private there.

The places were read, and are tested, in VERSIONS. A version that is not among them may still fit. Nobody looks at the
number; a place that has another shape raises `Changed` when it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

VERSIONS = ("0.5.20", "0.5.23")
"""As `TESTED_VERSIONS` of slime's `sglang_api/versions`, which this environment does not have."""
TARGET = "target"
"""Role of the trained model's checker; speculative draft models have other ones. 0.5.20 gives no roles."""


class Changed(Exception):
    """SGLang has one of the places otherwise; the text says which one, in which version."""


@contextlib.contextmanager
def place(name: str) -> Iterator[None]:
    """Raise Changed where what is inside does not find `name`, or finds it otherwise."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, KeyError) as error:
        raise Changed(
            f"slime's plugin knows SGLang {' and '.join(VERSIONS)}; {metadata.version('sglang')} has {name} otherwise"
            f" ({type(error).__name__}: {error})"
        ) from error


def around_configure(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what a server calls, with its ServerArgs, before it starts its processes, by `wrap` of it."""
    with place("entrypoints.engine._set_envs_and_config"):
        from sglang.srt.entrypoints import engine

        engine._set_envs_and_config = wrap(engine._set_envs_and_config)


def data_parallel(server_args: Any) -> bool:
    """Whether a controller starts the ranks: `--dp-size`, from 0.5.23 on also `--attn-dp-size`."""
    with place("ServerArgs.dp_size"):
        return bool(server_args.dp_size > 1 or getattr(server_args, "attn_dp_size", 1) > 1)


def host_allocators() -> dict[str, Any]:
    """Kind of device -> the function (dims, dtype, device, ...) that allocates its host buffers."""
    with place("mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS"):
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        found: dict[str, Any] = ALLOC_MEMORY_FUNCS
        return found


def weight_checker() -> Any:
    """The class that answers `/weights_checker` in each process, once for each model that the process runs."""
    with place("utils.weight_checker.WeightChecker (handle, _snapshot)"):
        from sglang.srt.utils.weight_checker import WeightChecker

        _ = WeightChecker.handle, WeightChecker._snapshot
        return WeightChecker


def model_of(checker: Any) -> Any:
    """The model that a checker looks at."""
    with place("WeightChecker._get_model()"):
        return checker._get_model()


def place_of(checker: Any, role: str | None) -> dict[str, Any]:
    """`parallelism_info` of an answer; `role` as the checker was given it, None where this version gives none."""
    with place("WeightChecker._parallelism_info() (from 0.5.23 on: role=)"):
        info = checker._parallelism_info() if role is None else checker._parallelism_info(role=role)
        found: dict[str, Any] = info.model_dump()
        return found
