"""Adapters (LoRA) of an update -> vLLM's own LoRA layers, as `ADAPTER` and `ADAPTER.NAME`, without a file.

    update --> `replace`, in each worker         request with "model": ADAPTER --> `Resolver`, in the HTTP process
                   '--> `_load_adapter` of vLLM, at the next request with it <--'

vLLM drops all adapters at the end of an update, so the next request loads the newest. A path with `load_inplace`, the
way over vLLM's own route, would be read again at every step. Written for vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

import torch
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

ADAPTER = "slime-adapter"
"""Name by which requests choose the shared adapter; the client's `wire` has the same. `ADAPTER.NAME` is another."""
_OTHERS = "adapters."
"""Begin of the names of the other adapters' tensors, `adapters.NAME.MODULE.lora_A`."""
_DOWN, _UP = ".lora_A", ".lora_B"
_PATH = "received in an update"
_received: dict[str, dict[str, torch.Tensor]] = {}
"""Tensors by name of the adapter as requests have it, and by `MODULE.lora_A`."""


class Resolver(LoRAResolver):
    """Makes an adapter known to the HTTP process at the first request for it."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return a request that `_load_adapter` answers from memory; None for another name."""
        del base_model_name
        if lora_name.partition(".")[0] != ADAPTER:
            return None
        return LoRARequest(lora_name, 1 + crc32(lora_name.encode()) % 2**30, _PATH)


def register() -> None:
    """Add the resolver."""
    LoRAResolverRegistry.register_resolver(ADAPTER, Resolver())


def _split(name: str) -> tuple[str, str]:
    """Return the adapter's name, as requests have it, and `MODULE.lora_A` or `MODULE.lora_B`."""
    if not name.startswith(_OTHERS):
        return ADAPTER, name
    adapter, _, rest = name.removeprefix(_OTHERS).partition(".")
    return f"{ADAPTER}.{adapter}", rest


def are_adapters(names: Iterable[str]) -> bool:
    """Return whether an update has adapters. Raises ValueError if it has other weights too."""
    kinds = {name.endswith((_DOWN, _UP)) for name in names}
    if len(kinds) > 1:
        raise ValueError("an update has adapters or other weights, not both")
    return True in kinds


def check(shapes: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]], model: Any) -> None:
    """Raise ValueError if an adapter does not fit the server's model and flags.

    Args:
        shapes: `MODULE.lora_A` [rank, in] and `MODULE.lora_B` [out, rank], perhaps behind `adapters.NAME.`.
        base: HF name -> shape of the checkpoint; empty if unknown.
        model: vLLM's model.
    """
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        raise ValueError("adapters need a server with --enable-lora")
    packed = manager.packed_modules_mapping
    taken = {word for name in manager.supported_lora_modules for word in packed.get(name, [name])}
    for name, shape in shapes.items():
        module, _, kind = _split(name)[1].rpartition(".")
        whole = base.get(f"{module}.weight")
        if module.rpartition(".")[2] not in taken:
            raise ValueError(f"{name}: vLLM has no adapters there; it has them in {', '.join(sorted(taken))}")
        rank, length = shape if kind == _DOWN[1:] else shape[::-1]
        if rank > manager.lora_config.max_lora_rank:
            raise ValueError(f"{name} has rank {rank}; --max-lora-rank is {manager.lora_config.max_lora_rank}")
        if base and (whole is None or length != whole[kind == _DOWN[1:]]):
            raise ValueError(f"{name} has shape {list(shape)}; the model's weight is {whole and list(whole)}")


def check_whole(names: Iterable[str]) -> None:
    """Raise ValueError if an adapter lacks a half."""
    downs, ups = ({name[: -len(_UP)] for name in names if name.endswith(kind)} for kind in (_DOWN, _UP))
    if halves := sorted(downs ^ ups):
        raise ValueError(f"the update has half of the adapter of {halves[0]}")


def replace(tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the adapters that the next request loads."""
    _received.clear()
    for name, tensor in tensors.items():
        adapter, rest = _split(name)
        _received.setdefault(adapter, {})[rest] = tensor


def serve() -> None:
    """Have vLLM's worker load the adapters from `replace`; others are loaded as before. Safe to call twice."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.worker_manager import WorkerLoRAManager

    from_files = WorkerLoRAManager._load_adapter
    if from_files.__module__ == __name__:
        return

    def load(self: Any, lora_request: LoRARequest) -> LoRAModel:
        if lora_request.lora_path != _PATH:
            return from_files(self, lora_request)
        received = _received.get(lora_request.lora_name)
        if received is None:
            raise ValueError(f"the last update has no adapter {lora_request.lora_name!r}; it has {sorted(_received)}")
        rank = next(len(tensor) for name, tensor in received.items() if name.endswith(_DOWN))
        mapper = getattr(self._adapter_manager.model, "hf_to_vllm_mapper", None)
        return LoRAModel.from_lora_tensors(
            lora_request.lora_int_id,
            {f"base_model.model.{name}.weight": tensor for name, tensor in received.items()},
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # the trainer has scaled B
            device="cpu",
            dtype=self.lora_config.lora_dtype,
            model_vocab_size=self.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )

    WorkerLoRAManager._load_adapter = load
