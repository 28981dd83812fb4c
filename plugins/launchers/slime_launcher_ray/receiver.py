"""Send weights between actors: in buckets through the object store, with one call in flight at a time.

    rank 0's actor     RemoteReceiver: WeightSync's receiver   --bucket refs-->   rollout actor   BucketStream
    rollout actor      engine_proxy, the same refs             --bucket refs-->   engine actor    BucketStream

An engine iterates a `BucketStream` of (HF name, tensor) pairs, like those of a trainer in the same process. The tensors
are in shared memory that must not be written to, so engines copy them. Ray may reorder two calls of one caller, so each
bucket, and the end, is sent only after the previous bucket was accepted. Meanwhile the receiver reads, and the sender
fills the next bucket.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime_core.errors import WeightSyncError
from slime_core.waits import waiting
from slime_launcher_ray.wait import BUCKETS, WEIGHTS, Member

if TYPE_CHECKING:
    import torch

END, BROKEN = "end", "broken"


def pack(pairs: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[list[tuple[str, str, list[int], Any]]]:
    """Yield tensors in lists of (name, dtype, shape, bytes as a numpy array), each list of about `limit` bytes."""
    bucket: list[tuple[str, str, list[int], Any]] = []
    size = 0
    for name, tensor in pairs:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        length = flat.numel() * flat.element_size()
        if bucket and size + length > limit:
            yield bucket
            bucket, size = [], 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        bucket.append((name, dtype, list(tensor.shape), flat.view(_bytes()).numpy()))
        size += length
    if bucket:
        yield bucket


def unpack(bucket: list[tuple[str, str, list[int], Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs of a bucket made by `pack`, without a copy."""
    import torch

    for name, dtype, shape, raw in bucket:
        kind: torch.dtype = getattr(torch, dtype)
        flat = torch.from_numpy(raw).view(kind) if raw.size else torch.empty(0, dtype=kind)
        yield name, flat.reshape(shape)


class BucketStream:
    """The receiving end of a transfer. It is iterated once while another thread calls `put`."""

    def __init__(self, sender: str, patience: float) -> None:
        self._sender = sender
        self._patience = patience
        self._change = threading.Condition()
        self._next: list[Any] = []
        """Content that has arrived and has not been taken; at most one element."""
        self._over = False

    def put(self, what: Any) -> None:
        """Add the next bucket's [reference], END or BROKEN, after the previous content has been taken.

        Raises:
            WeightSyncError: The reader did not take the previous content in time.
        """
        with self._change, waiting("room for weights", deadline=self._patience, then="the weight update fails"):
            if not self._change.wait_for(lambda: self._over or not self._next, timeout=self._patience):
                raise WeightSyncError("no receiver takes the weights; the update is given up")
            if what == BROKEN:
                self._over = True
            self._next.append(what)
            self._change.notify_all()

    def give_up(self) -> None:
        """End all pending reads and puts at once, because the sender or the reader is gone."""
        with self._change:
            self._over = True
            self._change.notify_all()

    def references(self) -> Iterator[Any]:
        """Yield the buckets as they arrive. Raises WeightSyncError if no more buckets arrive."""
        while True:
            with (
                self._change,
                waiting(f"weights from {self._sender}", deadline=self._patience, then="the update fails"),
            ):
                if not self._change.wait_for(lambda: self._over or self._next, timeout=self._patience):
                    raise WeightSyncError(
                        f"no weights came from {self._sender} for {self._patience:.0f} s; the update is given up"
                    )
                if self._over:
                    raise WeightSyncError(f"{self._sender} could not go on with the weights; its own error says why")
                content = self._next.pop()
                self._change.notify_all()
            if content == END:
                return
            yield content

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for (reference,) in self.references():
            yield from unpack(ray.get(reference, timeout=self._patience))


class Streams:
    """The transfers that an actor receives, by number; shared by the calls of two concurrency groups."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._open: dict[str, BucketStream] = {}

    def open(self, number: str, sender: str) -> BucketStream:
        """Open a transfer; the sender calls this before its first bucket."""
        self._open[number] = BucketStream(sender, self._patience)
        return self._open[number]

    def take(self, number: str) -> BucketStream:
        """Return the transfer for the call that reads it, which may happen once."""
        return self._open[number]

    def close(self, number: str) -> None:
        """Close a transfer that has been read or will not be read, and end the wait of a pending bucket."""
        stream = self._open.pop(number, None)
        if stream is not None:
            stream.give_up()

    def give_up(self) -> None:
        """End all transfers, because their sender is gone."""
        for stream in list(self._open.values()):
            stream.give_up()

    def put(self, number: str, what: Any) -> None:
        """Deliver content to a transfer; content for a closed transfer is dropped."""
        stream = self._open.get(number)
        if stream is not None:
            stream.put(what)


def send(member: Member, method: str, references: Iterable[Any], *rest: Any) -> Any:
    """Call `method(number, *rest)` of the actor, which reads the buckets while they are sent, and return its result.

    Args:
        member: Actor with `open_stream`, `bucket` and the method.
        method: Method whose first argument is the number of the transfer.
        references: [reference] of each bucket; iterated only as far as the receiver reads.
        rest: Further arguments.
    """
    # Unique over all senders, including an actor that replaces a dead one.
    number = uuid.uuid4().hex
    member.call("open_stream", number, group=BUCKETS)
    answer = member.submit(method, number, *rest, group=WEIGHTS)
    what, accepted = f"taking weights ({method})", None
    try:
        for content in itertools.chain(references, [END]):
            if accepted is not None and not member.first_of(accepted, answer, what):
                break  # the method failed or needs no more buckets
            accepted = member.submit("bucket", number, content, group=BUCKETS)
    except BaseException:
        member.submit("bucket", number, BROKEN, group=BUCKETS)
        raise
    return member.get(answer, method)


class RemoteReceiver:
    """A `weights.sync.WeightReceiver` for a rollout stage in another actor.

    Args:
        rollout: Actor of the rollout stage.
        bucket_bytes: Approximate size of a bucket in the object store.
    """

    def __init__(self, rollout: Member, bucket_bytes: int) -> None:
        self._rollout = rollout
        self._bucket_bytes = bucket_bytes

    @property
    def weight_transports(self) -> tuple[str, ...]:
        """Transports that the engine offers now."""
        return tuple(self._rollout.call("weight_transports", group=WEIGHTS))

    def update_weights(self, transport: str, payload: Any, version: int) -> Mapping[str, float] | None:
        """Send weights: tensors in buckets, other payloads unchanged. All nodes must share a directory payload."""
        measured: Mapping[str, float] | None
        if isinstance(payload, Iterator):
            measured = self._send("update_weights", payload, transport, version)
        else:
            payload = payload.absolute() if isinstance(payload, Path) else payload
            measured = self._rollout.call("update_weights_from", payload, transport, version, group=WEIGHTS)
        return measured

    @property
    def engines(self) -> list[RemoteEngine]:
        """Engines for the user's function (`--custom-update-weight-post-write-path`)."""
        return [RemoteEngine(self._rollout)] if self.weight_transports else []

    def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str] | None:
        """Return the names of tensors that the engine serves differently; None if it cannot compare tensors."""
        if not self._rollout.call("compares_weights", group=WEIGHTS):
            return None
        found: list[str] | None = self._send("differing_weights", weights)
        return found

    def weight_checksums(self) -> dict[str, str]:
        """Return the checksums of the weights that the rollout stage's engine serves."""
        found: dict[str, str] = self._rollout.call("weight_checksums", group=WEIGHTS)
        return found

    def _send(self, method: str, weights: Iterable[tuple[str, torch.Tensor]], *rest: Any) -> Any:
        references = ([ray.put(bucket)] for bucket in pack(weights, self._bucket_bytes))
        return send(self._rollout, method, references, *rest)


class RemoteEngine:
    """A proxy of the engine for `--custom-update-weight-post-write-path`; its methods run in the rollout actor."""

    def __init__(self, rollout: Member) -> None:
        self._rollout = rollout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self._rollout.call("call_engine", name, *args, group=WEIGHTS)


def _bytes() -> torch.dtype:
    import torch

    return torch.uint8
