"""Servers that take weights as SGLang 0.5.20 (no sessions) and 0.5.23 (sessions, few names allowed in pickles) do."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from slime_core.models.hf_io import read_weights
from slime_core.weights.sync import tensor_checksum
from tests.unit.engines.sglang.api.servers import Reaction, Server, well

ALLOWED = {
    ("torch", "Tensor"), ("torch", "Size"), ("torch", "uint8"), ("torch", "float32"), ("torch", "bfloat16"),
    ("torch", "int8"), ("torch", "float64"),
    ("torch.storage", "UntypedStorage"), ("types", "SimpleNamespace"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
}  # fmt: skip
"""What these messages need of the names that SGLang 0.5.23 allows."""


class Careful(pickle.Unpickler):
    """As SGLang's."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name})")
        return super().find_class(module, name)


class WeightServer:
    """A `Reaction` with weights. `broken` maps a path to what is done there instead, once."""

    def __init__(self, software: str = "0.5.20", **broken: Reaction) -> None:
        self.software = software
        self.broken = {f"/{path}": reaction for path, reaction in broken.items()}
        self.weights: dict[str, torch.Tensor] = {}
        self.version: str = "default"
        self.session = False
        self.paused: str | None = None
        self.running = 0
        """Requests that keep the cache from being flushed."""
        self.groups: dict[str, ProcessGroupGloo] = {}

    @property
    def sessions(self) -> bool:
        return self.software >= "0.5.21"

    async def __call__(self, server: Server, request: web.Request, body: Any, before: int) -> Any:
        if request.path in self.broken:
            return await self.broken.pop(request.path)(server, request, body, before)
        method = getattr(self, request.path[1:], None)
        return await well(server, request, body, before) if method is None else await method(body)

    async def server_info(self, body: Any) -> Any:
        return {"version": self.software, "tp_size": 1, "pp_size": 1, "device": "cpu", "weight_version": self.version}

    async def model_info(self, body: Any) -> Any:
        return {"weight_version": self.version}

    async def pause_generation(self, body: Any) -> Any:
        self.paused = body["mode"]
        return {}

    async def continue_generation(self, body: Any) -> Any:
        assert not self.session, "it would generate with half the weights"
        self.paused = None
        return {}

    async def flush_cache(self, body: Any) -> Any:
        if self.running:
            self.running -= 1
            return 400, b"Cache not flushed."
        return 200, b"Cache flushed."

    async def begin_weight_update(self, body: Any) -> Any:
        if self.session or not self.sessions:
            return 400, {"success": False, "message": "a weight-update session is already open"}
        self.session = True
        return {"success": True}

    async def end_weight_update(self, body: Any) -> Any:
        if not self.session:
            return 400, {"success": False, "message": "no weight-update session is open"}
        self.session = False
        return {"success": True}

    async def update_weights_from_tensor(self, body: Any) -> Any:
        assert self.paused
        if self.sessions and not self.session:
            return 400, {"success": False, "message": "update_weights_from_tensor must run between begin and end"}
        (payload,) = body["serialized_named_tensors"]
        bucket = Careful(io.BytesIO(base64.b64decode(payload))).load()
        for m in bucket["metadata"]:
            assert m.numel == m.end_idx - m.start_idx
            piece = bucket["flattened_tensor"][m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)
            self.weights[m.name] = piece.clone()
        return self._took(body)

    async def update_weights_from_disk(self, body: Any) -> Any:
        assert body.get("flush_cache", "slime" not in self.software) is False, "SGLang ends when it cannot flush"
        folder = Path(body["model_path"])
        found = read_weights(folder) if folder.exists() else [("loaded", torch.tensor(0))]
        self.weights = {name: tensor for name, tensor in found if tensor.numel()}
        return self._took(body)

    async def weights_checker(self, body: Any) -> Any:
        assert body == {"action": "checksum"}
        told = {"checksums": {name: tensor_checksum(tensor) for name, tensor in self.weights.items()}}
        return {"success": True} | (told if "slime" in self.software else {"ranks": [told]})

    async def init_weights_update_group(self, body: Any) -> Any:
        name, world = body["group_name"], body["world_size"]
        limit = timedelta(seconds=10)

        def join() -> ProcessGroupGloo:
            store = TCPStore(body["master_address"], body["master_port"], world, False, timeout=limit)
            prefix = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            return ProcessGroupGloo(prefix, body["rank_offset"], world, limit)

        assert body["backend"] == "gloo"
        self.groups[name] = await asyncio.to_thread(join)
        return {"success": True}

    async def destroy_weights_update_group(self, body: Any) -> Any:
        self.groups.pop(body["group_name"])
        return {"success": True}

    async def update_weights_from_distributed(self, body: Any) -> Any:
        assert self.paused
        if body["group_name"] not in self.groups:
            return 400, {"success": False, "message": "no such group"}
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(body["shapes"], dtypes)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)

        def receive() -> None:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self.groups[body["group_name"]].broadcast([flat], options).wait(timedelta(seconds=10))

        await asyncio.to_thread(receive)
        at = 0
        for name, dtype, shape, size in zip(body["names"], dtypes, body["shapes"], sizes):
            self.weights[name] = flat[at : at + size].view(dtype).reshape(shape).clone()
            at += size
        return self._took(body)

    def _took(self, body: Any) -> Any:
        if body["weight_version"] is not None:
            self.version = body["weight_version"]
        return {"success": True, "message": "Success"}
