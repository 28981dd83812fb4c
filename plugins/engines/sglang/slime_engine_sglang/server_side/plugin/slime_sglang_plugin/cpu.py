"""What SGLang does for CUDA's sake, done otherwise on CPU.

    start of a server                its processes are spawned, and each imports for 5 s what the first has imported
    --enable-return-routed-experts   its host buffer is registered with cudaHostRegister
    POST /weights_checker            0.5.20 synchronises with CUDA
    processors of Qwen-VL            their module imports Qwen3.5's, which reads names of kernels for CPUs with AMX

Every place inside SGLang that is replaced is in this file, as it was read in 0.5.20 and 0.5.23. A repair that does not
find its place in this version says so in the log.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from importlib import metadata
from typing import Any
from unittest import mock

logger = logging.getLogger(__name__)


def apply() -> None:
    """Do it, on CPU; on a GPU nothing is changed."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or torch.cuda.is_available():
        return
    for repair in (forked_processes, plain_host_memory, weight_checker, names_of_kernels):
        try:
            repair()
        except (ImportError, AttributeError, TypeError, KeyError) as error:
            version = metadata.version("sglang")
            logger.warning(
                "slime: %s is left out, SGLang %s has its place otherwise: %r", repair.__name__, version, error
            )


def forked_processes() -> None:
    """Scheduler and detokenizer begin with what the first process has imported: two thirds of a start's CPU time.

    CUDA does not survive a fork, and neither does what another thread holds at that moment. A controller of
    data-parallel ranks (`dp_size`, from 0.5.23 on also `attn_dp_size`) starts them from threads.
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
    """Host buffers of a server without a device are ordinary memory."""
    import torch
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = allocate


def weight_checker() -> None:
    """Checksums wait for no GPU."""
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
"""What keeps the names declared."""


def names_of_kernels() -> None:
    """Declared without a kernel: a Qwen3.5 that calls one gets torch's error, and other models do not need them."""
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in _KERNELS:
        if not hasattr(torch.ops.sgl_kernel, name):
            library.define(f"{name}(Tensor x) -> ()")
    _declared.append(library)
