"""Weights -> servers: by memory of this host that they map, or from a directory that they see.

Both go over HTTP as the word of where the weights are: `/update_weights_from_tensor`, `/update_weights_from_disk`. Each
process of a server must be given its own use of the memory, which must live until every one has answered. Host tensors
are copied into shared memory once for all; CUDA tensors travel as IPC handles, one each.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_engine_sglang.api.worker import Worker
from slime_engine_sglang.weights.buckets import Bucket
from slime_engine_sglang.weights.protocol import ServerFacts
from slime_engine_sglang.weights.round import Round
from slime_engine_sglang.weights.shared_memory import message


async def push_shared(round_: Round, bucket: Bucket, number: int, *, last: bool) -> None:
    """Every live server copies the bucket out. Raises WeightSyncError as `Round.each`."""

    async def take(worker: Worker) -> None:
        facts = round_.facts[worker]
        body = {
            "serialized_named_tensors": payloads(bucket, facts),
            "load_format": "flattened_bucket",
            "flush_cache": False,
            # With the last bucket, so that a part of the weights never bears it.
            "weight_version": str(round_.version) if last else None,
        }
        path, first = "/update_weights_from_tensor", number == 0
        await round_.load(worker, path, body, first=first)

    await round_.each(f"sending bucket {number}", take)


def payloads(bucket: Bucket, facts: ServerFacts) -> list[str]:
    """One message per tensor-parallel rank of a server; pipeline stages of one rank read the same one."""
    metadata = [
        SimpleNamespace(
            name=s.name, shape=s.shape, dtype=s.dtype, start_idx=s.start, end_idx=s.end, numel=s.end - s.start
        )
        for s in bucket.slices
    ]
    if bucket.shared is None:
        assert bucket.flat.is_cuda, "host memory is shared"
        return [message(bucket.flat, metadata) for _ in range(facts.tp_size)]
    bucket.shared.lend(facts.tp_size * facts.pp_size)
    return [message(bucket.flat, metadata)] * facts.tp_size


async def push_directory(round_: Round, path: Path) -> None:
    """Every live server loads `path`. Raises WeightSyncError as `Round.each`."""

    async def take(worker: Worker) -> None:
        body: dict[str, Any] = {"model_path": str(path.absolute()), "weight_version": str(round_.version)}
        if round_.facts[worker].is_sglang:  # whose cache is flushed later; `control.flush` says why
            body["flush_cache"] = False
        await round_.load(worker, "/update_weights_from_disk", body)
        worker.loaded = None

    await round_.each(f"loading {path}", take)
