"""The weight transfer backend "slime" of a vLLM worker: shared memory, files, or a broadcast -> the live model.

All take HF names and shapes; the model's own `load_weights` fuses and shards them. Written for vLLM 0.32.0. vLLM's
layerwise reload replaces a layer when all of its parts have come. An update must have every tensor of the checkpoint
that the server was started with, or adapters alone (`adapters`), which leave the layers as they are. One that is not
whole raises an error: some layers may be new by then, so the client updates or restarts the server before it serves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from slime_vllm_plugin import adapters

_TIMEOUT = timedelta(minutes=30)
"""Longest wait in a broadcast; the trainer's own deadline is shorter."""
_SHOWN = 5


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A process group to join, or to leave."""

    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 0
    world_size: int = 0
    group_name: str = ""
    backend: str = ""
    leave: str = ""
    """Name of a group to leave."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One part of an update: a directory, a buffer in shared memory, or a buffer to receive."""

    model_path: str = ""
    """Directory in HF layout, which is all of the update."""
    path: str = ""
    """File in which shared memory appears."""
    offset: int = 0
    nbytes: int = 0
    """Bytes of the buffer, whose tensors follow each other without gaps."""
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    group_name: str = ""
    """Group whose rank 0 sends the buffer."""
    # Said to every server by slime's calls, which are SGLang's; the version comes at the end of an update.
    weight_version: str | None = None
    flush_cache: bool = False
    load_format: str = ""


class SlimeTransfer(WeightTransferEngine):
    """Implements vLLM's four phases: init, start, update (any number of times), finish."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._groups: dict[str, tuple[Any, str]] = {}
        """Process groups by name, each with the device of its buffers."""
        self._received: set[str] = set()
        self._adapters: dict[str, torch.Tensor] = {}
        adapters.serve()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join or leave a process group, under the store names that slime's side uses."""
        import torch.distributed as dist

        self._groups.pop(init_info.leave, None)
        if not init_info.group_name:
            return
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=_TIMEOUT)
        name, device = init_info.group_name, "cuda" if init_info.backend == "nccl" else "cpu"
        prefix = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        if init_info.backend == "nccl":
            group = dist.ProcessGroupNCCL(prefix, rank, init_info.world_size)
        else:
            group = dist.ProcessGroupGloo(prefix, rank, init_info.world_size, _TIMEOUT)
        self._groups[name] = group, device

    def start_weight_update(self) -> None:
        """Prepare the layers for new weights."""
        self._received = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a part. The base class would wait for an accelerator, which raises an error without one."""
        with torch.inference_mode():
            try:
                self.receive_weights(self.parse_update_info(update_info))
            except BaseException as error:
                # vLLM has ended the session. Without this the layers would stay without memory.
                untouched = not self._received
                self._finalize(whole=False)
                note = "nothing was written" if untouched else "a part was written"
                raise ValueError(f"{type(error).__name__}: {error}; {note}") from error
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a part."""
        if update_info.model_path:
            shapes = _shapes(Path(update_info.model_path))
            if adapters.are_adapters(shapes):
                self._load(dict(_from_directory(Path(update_info.model_path))))
                return
            self._check(shapes)
            if missing := self._wanted.keys() - shapes.keys():
                raise ValueError(_missing(missing))
            self._load_checked(_from_directory(Path(update_info.model_path)))
        elif update_info.path:
            self._load(dict(_split(_read(update_info), update_info)))
        else:
            self._load(dict(_split(self._broadcast(update_info), update_info)))

    def finish_weight_update(self) -> None:
        """Put the new weights into use. Raises ValueError if a tensor is missing."""
        received, fresh = self._received, self._adapters
        missing: Collection[str] = self._wanted.keys() - received if received else ()
        self._finalize(whole=not missing)
        if missing:
            raise ValueError(_missing(missing))
        adapters.check_whole(fresh)
        if fresh:
            adapters.replace(fresh)

    def _finalize(self, *, whole: bool) -> None:
        """End the session; layers that an update has not completed keep their old weights.

        vLLM would fill a layer of which parts came with uninitialised memory, and would leave one without memory if
        its last part came and could not be loaded, e.g. because memory ran out.
        """
        self._received, self._adapters = set(), {}
        if not whole:
            for module in self.model.modules():
                get_layerwise_info(module).load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        # On CPU a linear layer computes from a packed copy that its own loading makes. A head that is tied to the
        # embedding has the same parameter but is never loaded, so its copy would keep the old weights.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the process groups."""
        self._groups = {}

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError if a tensor has a name or a shape that the checkpoint of the start does not have."""
        for name, shape in shapes.items():
            wanted = self._wanted.get(name, shape)
            if wanted != shape:
                raise ValueError(f"{name} has shape {list(shape)}; the model's is {list(wanted)}")
            if self._wanted and name not in self._wanted and not name.startswith("lm_head."):  # it may be tied
                raise ValueError(f"{name} is no tensor of the model")

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if adapters.are_adapters(shapes):
            adapters.check(shapes, self._wanted, self.model)
            self._adapters |= weights
        else:
            self._check(shapes)
            self._load_checked(weights.items())

    def _load_checked(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                self._received.add(name)
                yield name, tensor

        self.model.load_weights(counted())

    def _broadcast(self, info: UpdateInfo) -> torch.Tensor:
        import torch.distributed as dist

        group, device = self._groups[info.group_name]
        size = sum(_nbytes(dtype, shape) for dtype, shape in zip(info.dtypes, info.shapes, strict=True))
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([flat], options).wait()
        return flat

    @cached_property
    def _wanted(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the checkpoint that the server was started with; empty if it has no *.safetensors on this disk."""
        directory = Path(self.model_config.model)
        return _shapes(directory) if any(directory.glob("*.safetensors")) else {}


def _read(info: UpdateInfo) -> torch.Tensor:
    """Copy a buffer out of shared memory: the layers keep tensors until they are complete."""
    flat = bytearray(info.nbytes)
    with Path(info.path).open("rb") as file:
        file.seek(info.offset)
        if file.readinto(flat) != info.nbytes:
            raise ValueError(f"{info.path} is shorter than {info.offset} + {info.nbytes} bytes")
    return torch.frombuffer(flat, dtype=torch.uint8)


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a directory in HF layout. Raises ValueError if it has none."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not found:
        raise ValueError(f"{directory}: no *.safetensors there")
    return found


def _from_directory(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)


def _missing(names: Collection[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"the update lacks {', '.join(listed[:_SHOWN])}{more}"


def _split(flat: torch.Tensor, info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    at = 0
    for name, dtype, shape in zip(info.names, info.dtypes, info.shapes, strict=True):
        size = _nbytes(dtype, shape)
        yield name, flat[at : at + size].view(getattr(torch, dtype)).reshape(shape)
        at += size


def _nbytes(dtype: str, shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count * getattr(torch, dtype).itemsize
