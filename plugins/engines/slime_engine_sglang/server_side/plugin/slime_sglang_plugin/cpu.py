"""Replacements on CPU for parts of SGLang that assume CUDA.

    start of a server                its processes are spawned, and each imports for 5 s what the first has imported
    --enable-return-routed-experts   its host buffer is registered with cudaHostRegister
    --enable-lora                    its tables are in pinned memory
    POST /weights_checker            0.5.20 synchronises with CUDA
    processors of Qwen-VL            their module imports Qwen3.5's, which reads names of kernels for CPUs with AMX

This file has every replacement inside SGLang, written against 0.5.20 and 0.5.23. If the installed version lacks the
replaced code, the log has a message.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from importlib import metadata
from typing import Any
from unittest import mock

logger = logging.getLogger(__name__)


def apply() -> None:
    """Apply the replacements on CPU; on a GPU change nothing."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or torch.cuda.is_available():
        return
    for repair in (forked_processes, plain_host_memory, unpinned_memory, weight_checker, names_of_kernels):
        try:
            repair()
        except (ImportError, AttributeError, TypeError, KeyError) as error:
            version = metadata.version("sglang")
            logger.warning(
                "slime: %s is left out, SGLang %s has its place otherwise: %r", repair.__name__, version, error
            )


def forked_processes() -> None:
    """Fork scheduler and detokenizer, so that they reuse the first process's imports: two thirds of a start's CPU time.

    Neither CUDA nor locks of other threads survive a fork. A controller of data-parallel ranks (`dp_size`, from 0.5.23
    on also `attn_dp_size`) starts its processes from threads.
    """
    from sglang.srt.entrypoints import engine

    configure = engine._set_envs_and_config

    def configured(server_args: Any, *args: Any, **kwargs: Any) -> Any:
        found = configure(server_args, *args, **kwargs)
        data_parallel = server_args.dp_size > 1 or getattr(server_args, "attn_dp_size", 1) > 1
        if not data_parallel and len(os.listdir("/proc/self/task")) == 1:
            multiprocessing.set_start_method("fork", force=True)
        return found

    engine._set_envs_and_config = configured


def plain_host_memory() -> None:
    """Make host buffers of a server without a device ordinary memory."""
    import torch
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = allocate


def unpinned_memory() -> None:
    """Make ordinary memory where pinned memory is asked for, which torch has only with a device."""
    import torch

    def without(make: Any) -> Any:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return made

    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, without(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment,misc]


def weight_checker() -> None:
    """Make checksums work without waiting for a GPU."""
    import torch
    from sglang.srt.utils.weight_checker import WeightChecker

    handle = WeightChecker.handle

    def handle_on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.cuda, "synchronize", return_value=None):
            return handle(self, *args, **kwargs)

    WeightChecker.handle = handle_on_cpu


_KERNELS = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)  # fmt: skip
_declared: list[Any] = []
"""Libraries kept alive so that the kernel names stay declared."""


def names_of_kernels() -> None:
    """Declare kernel names without kernels: a Qwen3.5 that calls one gets torch's error; other models need none."""
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in _KERNELS:
        if not hasattr(torch.ops.sgl_kernel, name):
            library.define(f"{name}(Tensor x) -> ()")
    _declared.append(library)
