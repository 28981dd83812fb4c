"""Run megatron-core on a machine without an accelerator: a scoped device mode and the fixes that it needs.

`ProcessGroups`, `build_model` and the trainer enter `on_device(device)` around every call into Megatron; on an
accelerator it does nothing. No other part of the trainer depends on CPUs. The patch is not global. Inside the mode,
this thread's requests for "cuda" return CPU tensors, and some of Megatron's functions are replaced; at its end, torch
and Megatron are restored. Every fix names the problem that it works around, and has a test that fails when upstream no
longer needs the fix (tests/unit/trainers/megatron/test_cpu_mode.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from slime_core.ops import l2_norm

CPU = torch.device("cpu")
FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "tensor", "zeros", "ones", "empty", "full", "arange", "linspace",
        "empty_like", "zeros_like", "ones_like", "full_like",
    )
)  # fmt: skip

_ABSENT = object()
_NO_STREAM = object()
_depth = 0


@contextmanager
def on_device(device: torch.device | str) -> Iterator[None]:
    """Make Megatron's calls inside work on this device; use `with on_device(device):` or a decorator.

    May be nested. Do not use it around a `yield`: the code between two items would run in the mode as well.
    """
    global _depth
    if torch.device(device).type != "cpu" or _depth:
        yield
        return
    replaced: list[tuple[Any, str, Any]] = []
    _depth += 1
    try:
        for owner, name, value in _fixes():
            replaced.append((owner, name, owner.__dict__.get(name, _ABSENT)))
            setattr(owner, name, value)
        with _CpuForCuda():
            yield
    finally:
        for owner, name, before in reversed(replaced):
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        _depth -= 1


class _CpuForCuda(TorchFunctionMode):
    """A mode in which requests for a CUDA tensor return a CPU tensor.

    Device literals: pipeline_parallel/schedules.py (`total_num_tokens`), optimizer/optimizer.py (`found_inf`,
    `_dummy_overflow_buf`), optimizer/clip_grads.py, transformer/moe/moe_utils.py (losses of the router). `.cuda()`:
    models/common/language_module/language_module.py `setup_embeddings_and_output_layer`. Pinned memory:
    models/common/embeddings/rope_utils.py `get_pos_emb_on_this_cp_rank`. Names of types:
    `optimizer.py`, `distrib_optimizer.py` and `clip_grads.py` compare `Tensor.type()` with "torch.cuda.FloatTensor".
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in FACTORIES:
            if options.get("pin_memory"):
                del options["pin_memory"]
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = CPU
        elif func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        elif func is torch.Tensor.type and len(args) == 1 and not options:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        return func(*args, **options)


def _fixes() -> Iterator[tuple[Any, str, Any]]:
    """Yield (object, attribute, replacement while the mode is on)."""
    # Used as the `device` of buffers nearly everywhere, from tensor_parallel/layers.py to p2p_communication.py.
    yield torch.cuda, "current_device", lambda: CPU
    # dist_checkpointing/strategies (filesystem_async.py, fully_parallel.py) and timers.py wait for the device.
    yield torch.cuda, "synchronize", lambda device=None: None

    # moe_utils.py `RouterGatingLinearFunction` reads `te_general_gemm`, a name that only the import of Transformer
    # Engine binds: NameError without it.
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        yield moe_utils, "te_general_gemm", None

    # multi_latent_attention.py treats Transformer Engine as installed, because importing its wrappers never fails. It
    # then calls `isinstance` with a wrapper that is not a class: TypeError.
    if not importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE:
        yield importlib.import_module("megatron.core.transformer.multi_latent_attention"), "HAVE_TE", False

    # token_dispatcher.py `MoEAlltoAllTokenDispatcher`: `__init__` makes a CUDA stream unless there is one, and
    # `_maybe_dtoh_and_synchronize` copies the splits to the host on it. Here they are on the host.
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    yield dispatcher, "cuda_dtoh_stream", _NO_STREAM
    yield dispatcher, "_maybe_dtoh_and_synchronize", _splits_for_host

    # tensor_parallel/mappings.py gathers the tokens of tensor-parallel experts, a different number from each rank;
    # gloo's all_gather needs the same number from all ranks.
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    yield mappings, "_gather_along_first_dim", partial(_gather_uneven, mappings._gather_along_first_dim)

    # tensor_parallel/random.py `CheckpointFunction` saves the state of the CUDA generator, which fails, and restores
    # it, which leaves a call in the queue of torch.cuda's first use, with its stack, at every recomputed layer. Here
    # all randomness comes from torch's own generator.
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    yield random, "_get_cuda_rng_state", _get_rng_state
    yield random, "_set_cuda_rng_state", _set_rng_state

    # distrib_optimizer.py `_set_main_param_and_optimizer_states` was written for Apex's and Transformer Engine's
    # Adam: on torch's it looks for a saved "step" (KeyError) and copies into a leaf that requires gradients.
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    yield optimizer, "_set_main_param_and_optimizer_states", _set_optimizer_state

    # clip_grads.py `get_grad_norm_fp32` takes torch's float32 norm of each tensor where neither Apex nor Transformer
    # Engine is there; on a CPU it is 1% too small at 100M elements.
    yield importlib.import_module("megatron.core.optimizer.clip_grads"), "l2_norm_impl", _l2_norm


def _l2_norm(chunk_size: int, noop: Any, lists: Any, per_tensor: bool, *args: Any) -> tuple[torch.Tensor, None]:
    """Stand in for `amp_C.multi_tensor_l2norm`."""
    return l2_norm(tensor for tensors in lists for tensor in tensors).float()[None], None


def _splits_for_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    if not self.drop_and_pad and point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name, None)
            if isinstance(splits, torch.Tensor):
                setattr(self, name, splits.numpy())
    return tokens_per_expert


def _gather_uneven(
    original: Any, input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    """Gather rows as upstream does if all ranks have the same number of rows; else pad to the largest number."""
    if output_split_sizes is None or group.size() == 1:
        return original(input_, group, output_split_sizes, use_global_buffer)
    rows = [int(size) for size in output_split_sizes]
    gathered = input_.new_empty((len(rows) * max(rows), *input_.shape[1:]))
    filling = input_.new_zeros((max(rows) - input_.shape[0], *input_.shape[1:]))
    dist.all_gather_into_tensor(gathered, torch.cat((input_, filling)), group=group)
    return torch.cat([part[:size] for part, size in zip(gathered.chunk(len(rows)), rows, strict=True)])


def _get_rng_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


@torch.no_grad()
def _set_optimizer_state(self: Any, model_param: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    group, order = self.model_param_group_index_map[model_param]
    parameter = self.optimizer.param_groups[group]["params"][order]
    for name, state in {"param": parameter, **self.optimizer.state[parameter]}.items():
        if name in tensors:
            state.copy_(tensors[name])
