"""Buckets of weights -> servers on this host, which map the memory: `/update_weights_from_tensor`.

Over HTTP goes only where a bucket lies. Host tensors are copied into shared memory once for all servers; CUDA tensors
travel as IPC handles, one per server process. What a reader would get wrong: each process must be given its own use of
the memory, and the memory must live until every one has answered.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from slime_engine_sglang.api.shared_memory import message
from slime_engine_sglang.api.weight_buckets import Bucket
from slime_engine_sglang.api.weight_protocol import ServerFacts, load
from slime_engine_sglang.api.weight_round import Round
from slime_engine_sglang.api.worker import Worker


async def push_bucket(round_: Round, bucket: Bucket, number: int, *, last: bool) -> None:
    """Every live server copies the bucket out. Raises WeightSyncError as `Round.each`."""

    async def take(worker: Worker) -> None:
        facts, path = round_.facts[worker], "/update_weights_from_tensor"
        body = bucket_body(bucket, facts, str(round_.version) if last else None)
        await load(round_.http, worker.url, path, body, facts, timeout=round_.timeout, first=number == 0)

    await round_.each(f"sending bucket {number}", take)


def bucket_body(bucket: Bucket, facts: ServerFacts, version: str | None) -> dict[str, Any]:
    """The request; `version` goes with the last bucket, so that a part of the weights never bears it."""
    return {
        "serialized_named_tensors": payloads(bucket, facts),
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "weight_version": version,
    }


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
