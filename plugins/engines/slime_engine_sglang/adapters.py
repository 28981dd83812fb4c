"""Adapters (LoRA) of an update -> SGLang's own LoRA layers, without a file.

    update    each adapter: `/unload_lora_adapter`, `/load_lora_adapter_from_tensors`; then `/update_weight_version`
    request   "lora_path": `ADAPTER`, or `ADAPTER.NAME` of one of `--lora-adapters` (`Wire`)

SGLang unloads an adapter once no request uses it, so a server is paused by "abort", and the client continues the
requests on the new adapters. Tensors lie in shared memory, so the servers are this run's own, on this host.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from slime_engine_http.api.answers import ADAPTER
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerPool
from slime_engine_http.weights.buckets import Bucket, Buffers, Named
from slime_engine_http.weights.round import ADAPTERS, Round
from slime_engine_http.weights.transports import payloads
from slime_engine_http.weights.update import Kept, WeightUpdates

from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.protocols import Args

_DOWN, _UP = ".lora_A", ".lora_B"
_OTHERS = "adapters."
"""Begin of the names of the other adapters' tensors, `adapters.NAME.MODULE.lora_A`."""
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def server_fields(args: Args) -> dict[str, Any]:
    """Return the `ServerArgs` fields of a server that adds adapters; empty for merged weights."""
    if not args.lora_unmerged:
        return {}
    modules = list(args.lora_target_modules)
    return {
        "enable_lora": True,
        "max_lora_rank": args.lora_rank,
        "max_loras_per_batch": 2 + len(args.lora_adapters),  # the shared one, and requests before the first update
        "lora_target_modules": list(_LINEARS) if modules == ["all-linear"] else modules,
    }


class SglangUpdates(WeightUpdates):
    """The weight updates of SGLang's servers; with `--lora-unmerged` of adapters alone."""

    def __init__(self, http: Http, pool: WorkerPool, args: Args) -> None:
        if args.lora_unmerged:
            args = args.model_copy(update={"update_weight_pause_mode": "abort"})
        super().__init__(http, pool, args)

    async def transports(self) -> tuple[str, ...]:
        """Return the transports of `WeightUpdates`; of adapters only shared memory. Raises ConfigError without it."""
        found = await super().transports()
        if not self._args.lora_unmerged:
            return found
        if "tensor" not in found:
            raise ConfigError("--lora-unmerged: SGLang's servers take adapters from the run that has launched them")
        return ("tensor",)

    async def from_tensors(self, weights: Iterable[Named], version: int) -> dict[str, float]:
        """Send weights, or adapters, by shared memory. Raises WeightSyncError."""
        if not self._args.lora_unmerged:
            return await super().from_tensors(weights, version)
        if self._pool.pause_mode not in (None, "abort"):
            raise WeightSyncError(
                f"the servers are paused in mode {self._pool.pause_mode!r}, whose requests hold their adapters; resume"
                " them, or pause with 'abort'"
            )
        buckets = await asyncio.to_thread(_buckets, weights)
        kept = Kept(version, ADAPTERS, partial(_push, buckets), buckets=list(buckets.values()))
        try:
            return await self.run(kept)
        except BaseException:
            kept.free()
            raise


def _buckets(weights: Iterable[Named]) -> dict[str, Bucket]:
    """Return the tensors of each adapter by its name in requests. Raises WeightSyncError for other weights."""
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in weights:
        adapter, rest = ADAPTER, name
        if name.startswith(_OTHERS):
            adapter, _, rest = name.removeprefix(_OTHERS).partition(".")
            adapter = f"{ADAPTER}.{adapter}"
        if not rest.endswith((_DOWN, _UP)):
            raise WeightSyncError(f"{name}: with --lora-unmerged an update has adapters alone")
        found.setdefault(adapter, {})[f"base_model.model.{rest}.weight"] = tensor
    if not found:
        raise WeightSyncError("the trainer gives no adapters to send")
    buffers = Buffers(shared=True, keep=True)
    return {adapter: buffers.fill(list(named.items())) for adapter, named in found.items()}


async def _push(buckets: Mapping[str, Bucket], round_: Round) -> None:
    """Replace the adapters of every live server. Raises WeightSyncError as `Round.each`."""

    async def take(worker: Worker, name: str, bucket: Bucket) -> None:
        with contextlib.suppress(EngineError):  # the server has none yet; another refusal shows at the load
            await round_.call(worker, "/unload_lora_adapter", {"lora_name": name})
        body = {
            "lora_name": name,
            "config_dict": _config(bucket),
            "serialized_named_tensors": payloads(bucket, round_.facts[worker]),
            "load_format": "flattened_bucket",
        }
        await round_.load(worker, "/load_lora_adapter_from_tensors", body, first=False)

    for name, bucket in buckets.items():
        await round_.each(f"sending {name}", partial(take, name=name, bucket=bucket))
    body = {"new_version": str(round_.version), "abort_all_requests": False}
    await round_.each("setting the version", lambda worker: round_.call(worker, "/update_weight_version", body))


def _config(bucket: Bucket) -> dict[str, Any]:
    """Return PEFT's description of an adapter whose B is scaled by the trainer."""
    downs = [s for s in bucket.slices if s.name.endswith(f"{_DOWN}.weight")]
    modules = sorted({s.name.split(".")[-3] for s in downs})
    rank = downs[0].shape[0] if downs else 1
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
