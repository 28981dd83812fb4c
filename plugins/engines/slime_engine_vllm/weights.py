"""Weights -> vLLM's servers, by the transfer backend of slime that runs in them (`server_side`).

A bucket lies in shared memory under a name, which the server maps. Broadcasts and directories need nothing here:
`calls` translates the calls of `slime_engine_http`.
"""

from __future__ import annotations

from slime_engine_http.api.worker import Worker
from slime_engine_http.weights.buckets import Bucket
from slime_engine_http.weights.round import Round
from slime_engine_http.weights.update import WeightUpdates

from slime_core.errors import WeightSyncError


class VllmUpdates(WeightUpdates):
    """The weight updates of vLLM's servers."""

    async def push_shared(self, round_: Round, bucket: Bucket, number: int, *, last: bool) -> None:
        """Make every live server copy the bucket. Raises WeightSyncError as `Round.each`."""
        if bucket.shared is None:
            raise WeightSyncError("vLLM's servers take weights from host memory; type --update-weight-transport disk")
        body = {
            "path": bucket.shared.path,
            "offset": bucket.shared.offset,
            "nbytes": bucket.nbytes,
            "names": [s.name for s in bucket.slices],
            "dtypes": [str(s.dtype).removeprefix("torch.") for s in bucket.slices],
            "shapes": [list(s.shape) for s in bucket.slices],
        }

        async def take(worker: Worker) -> None:
            await round_.load(worker, "/update_weights_from_tensor", body, first=number == 0)

        await round_.each(f"sending bucket {number}", take)
