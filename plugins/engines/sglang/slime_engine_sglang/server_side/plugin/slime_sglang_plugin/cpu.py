"""What SGLang does for CUDA's sake, done otherwise on CPU; nothing is changed on a GPU.

    start of a server                its processes are spawned, and each imports for 5 s what the first has imported
    --enable-return-routed-experts   its host buffer is registered with cudaHostRegister
    POST /weights_checker            0.5.20 synchronises with CUDA, copies to it, and takes `.cpu()` for a copy
    processors of Qwen-VL            their module imports Qwen3.5's, which reads names of kernels for CPUs with AMX

A repair that does not find its place (`insides`) in this version of SGLang says so in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from slime_sglang_plugin import insides

logger = logging.getLogger(__name__)


def apply() -> None:
    """Do it, on CPU."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or torch.cuda.is_available():
        return
    for repair in (_forked_processes, _plain_host_memory, _weight_checker, _names_of_kernels):
        try:
            repair()
        except insides.Changed as error:
            logger.warning("slime: %s is left out: %s", repair.__name__.strip("_"), error)


def _forked_processes() -> None:
    """Scheduler and detokenizer begin with what the first process has imported: two thirds of a start's CPU time.

    CUDA does not survive a fork, and neither does what another thread holds at that moment. A controller of
    data-parallel ranks starts them from threads.
    """
    import multiprocessing

    def forking(configure: Callable[..., Any]) -> Callable[..., Any]:
        def configured(server_args: Any, *args: Any, **kwargs: Any) -> Any:
            found = configure(server_args, *args, **kwargs)
            if not insides.data_parallel(server_args) and len(os.listdir("/proc/self/task")) == 1:
                multiprocessing.set_start_method("fork", force=True)
            return found

        return configured

    insides.around_configure(forking)


def _plain_host_memory() -> None:
    """Host buffers of a server without a device are ordinary memory."""
    import torch

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    insides.host_allocators()["cpu"] = allocate


def _weight_checker() -> None:
    checker = insides.weight_checker()
    handle, snapshot = checker.handle, checker._snapshot

    def handle_on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _no_cuda():
            return handle(self, *args, **kwargs)

    checker.handle, checker._snapshot = handle_on_cpu, _copying(snapshot)


def _copying(snapshot: Callable[[Any], None]) -> Callable[[Any], None]:
    """On CPU `.cpu()` is the live weight itself, which would be compared with itself."""

    def copied(self: Any) -> None:
        snapshot(self)
        self._snapshot_tensors = {name: tensor.clone() for name, tensor in self._snapshot_tensors.items()}

    return copied


_KERNELS = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)  # fmt: skip
_declared: list[Any] = []
"""What keeps the names declared."""


def _names_of_kernels() -> None:
    """Declared without a kernel: a Qwen3.5 that calls one gets torch's error, and other models do not need them."""
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in _KERNELS:
        if not hasattr(torch.ops.sgl_kernel, name):
            library.define(f"{name}(Tensor x) -> ()")
    _declared.append(library)


@contextlib.contextmanager
def _no_cuda() -> Iterator[None]:
    """Inside, to copy to the GPU and to wait for it do nothing."""
    import torch

    with (
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
    ):
        yield
