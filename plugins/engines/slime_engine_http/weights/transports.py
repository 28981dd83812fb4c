"""Push weights to servers, through memory of this host that they map, or through a directory that they can read.

Both ways send the place of the weights over HTTP: `/update_weights_from_tensor`, `/update_weights_from_disk`. Each
process of a server needs its own reference to the memory, which must stay alive until every process has responded. Host
tensors are copied once into shared memory for all processes; CUDA tensors are sent as IPC handles, one per process.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_engine_http.api.worker import Worker
from slime_engine_http.weights.buckets import Bucket
from slime_engine_http.weights.protocol import ServerFacts
from slime_engine_http.weights.round import Round
from slime_engine_http.weights.shared_memory import message


async def push_shared(round_: Round, bucket: Bucket, number: int, *, last: bool) -> None:
    """Make every live server copy the bucket. Raises WeightSyncError as `Round.each`."""

    async def take(worker: Worker) -> None:
        facts = round_.facts[worker]
        body = {
            "serialized_named_tensors": payloads(bucket, facts),
            "load_format": "flattened_bucket",
            "flush_cache": False,
            # Sent with the last bucket, so that partly updated weights never have the new version.
            "weight_version": str(round_.version) if last else None,
        }
        path, first = "/update_weights_from_tensor", number == 0
        await round_.load(worker, path, body, first=first)

    await round_.each(f"sending bucket {number}", take)


def payloads(bucket: Bucket, facts: ServerFacts) -> list[str]:
    """Return one message per tensor-parallel rank of a server; the pipeline stages of a rank read the same message."""
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
    """Make every live server load `path`. Raises WeightSyncError as `Round.each`."""

    async def take(worker: Worker) -> None:
        body: dict[str, Any] = {"model_path": str(path.absolute()), "weight_version": str(round_.version)}
        if not round_.facts[worker].is_atomic:  # its cache is flushed later; see `control.flush` for the reason
            body["flush_cache"] = False
        sessions = round_.facts[worker].file_sessions
        if sessions:
            await round_.begin(worker)
        await round_.load(worker, "/update_weights_from_disk", body)
        if sessions:
            await round_.end(worker)
        worker.loaded = None

    await round_.each(f"loading {path}", take)
