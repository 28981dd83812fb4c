"""Weights in buckets come out as they went in; a sender that breaks off or is silent is an error, not a short model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from slime_launcher_ray.receiver import BROKEN, END, BucketStream, Streams, pack, send, unpack
from slime_launcher_ray.wait import WEIGHTS, Member

from slime_core.errors import WeightSyncError


def _weights() -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
        ("b", torch.arange(4).to(torch.bfloat16)),
        ("scalar", torch.tensor(3, dtype=torch.int64)),
        ("empty", torch.empty(0, 4)),
        ("transposed", torch.arange(6.0).reshape(2, 3).T),
    ]


@pytest.mark.parametrize("limit", [1, 30, 1 << 20])
def test_there_and_back(limit: int) -> None:
    buckets = list(pack(_weights(), limit))
    assert (len(buckets) == 1) == (limit > 1000)
    found = [pair for bucket in buckets for pair in unpack(bucket)]
    assert [name for name, _ in found] == [name for name, _ in _weights()]
    for (_, before), (_, after) in zip(_weights(), found):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)


@pytest.mark.parametrize(
    ("last", "message"), [(BROKEN, "rank 0 could not go on"), (None, "no weights came from rank 0")]
)
def test_an_update_that_does_not_end(last: str | None, message: str) -> None:
    stream = BucketStream("rank 0", patience=0.05)
    if last is not None:
        stream.put(last)
    with pytest.raises(WeightSyncError, match=message):
        list(stream)


def test_a_sender_that_is_gone_ends_the_reader_that_waits() -> None:
    streams = Streams(patience=30.0)
    stream = streams.open("0", "rank 0")
    said: list[str] = []

    def read() -> None:
        try:
            list(stream)
        except WeightSyncError as error:
            said.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    streams.give_up()
    reader.join(60)
    assert said == ["rank 0 could not go on with the weights; its own error says why"]


def test_what_the_sender_had_sent_is_not_read_after_it_is_gone() -> None:
    streams = Streams(patience=0.05)
    stream = streams.open("0", "rank 0")
    streams.put("0", END)
    streams.give_up()
    with pytest.raises(WeightSyncError, match="could not go on"):
        list(stream)


class _Actor:
    """Reads transfers, so many buckets of each."""

    def __init__(self, wanted: int | None = None) -> None:
        self._streams = Streams(patience=30.0)
        self._wanted = wanted

    def open_stream(self, name: str) -> None:
        self._streams.open(name, "rank 0")

    def bucket(self, name: str, what: Any) -> None:
        self._streams.put(name, what)

    def read(self, name: str) -> list[Any]:
        try:
            found = []
            for (reference,) in self._streams.take(name).references():
                found.append(reference)
                if len(found) == self._wanted:
                    break
            return found
        finally:
            self._streams.close(name)


class _NewestFirst(Member):
    """As Ray may do it: of the calls that are on the way the last one runs first, once the caller waits."""

    def __init__(self, actor: _Actor) -> None:
        super().__init__("rollout", actor, WeightSyncError)
        self._on_the_way: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, method: str, *args: Any, group: str = "", num_returns: int = 1) -> Any:
        future: Future[Any] = Future()
        call = (future, lambda: getattr(self.handle, method)(*args))
        if group == WEIGHTS:
            threading.Thread(target=_run, args=call, daemon=True).start()
        else:
            self._on_the_way.append(call)
        return future

    def get(self, reference: Any, what: str) -> Any:
        while self._on_the_way:
            _run(*self._on_the_way.pop())
        return reference.result(timeout=60)

    def first_of(self, reference: Any, other: Any, what: str) -> bool:
        self.get(reference, what)
        return not other.done()


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_calls_that_overtake_each_other_lose_no_bucket(count: int) -> None:
    assert send(_NewestFirst(_Actor()), "read", ([n] for n in range(count))) == list(range(count))


def test_a_sender_that_breaks_off_is_an_error_of_both() -> None:
    def references() -> Any:
        yield [0]
        raise OSError("no more memory")

    with pytest.raises(OSError, match="no more memory"):
        send(_NewestFirst(_Actor()), "read", references())


def test_a_bucket_that_nobody_takes_any_more_does_not_wait() -> None:
    streams = Streams(patience=3600.0)
    streams.open("0", "rank 0")
    streams.put("0", ["one"])
    waiting = threading.Thread(target=streams.put, args=("0", ["another"]))
    waiting.start()
    streams.close("0")
    waiting.join(60)
    assert not waiting.is_alive()
