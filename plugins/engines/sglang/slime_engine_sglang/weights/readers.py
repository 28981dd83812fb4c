"""Asking one server where it holds the trained tensors, and comparing what it holds: `check` drives this.

Servers of ours hold HF's tensors and tell a checksum of each. SGLang fuses and shards parameters, so HF names do not
exist there; slime's plugin in the server (`read_back` in `server_side/plugin`) tells for each name which elements are
held where, and their checksums. A checksum that agrees is half of it. Every trained element must be held by some
process of the server, and every parameter of the server filled from some trained tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from slime_core.errors import EngineError
from slime_core.weights.checksum import checksum_dtype, tensor_checksum
from slime_engine_sglang.api.transport import Http, expecting
from slime_engine_sglang.api.versions import tested
from slime_engine_sglang.api.worker import Worker
from slime_engine_sglang.weights.buckets import Named
from slime_engine_sglang.weights.protocol import server_facts

ACTION = "slime:read-back "
"""Of `/weights_checker`; `weight_action` in the servers' plugin answers it."""
_FACTS = ""
_THREADS = 4
_DRAFT = re.compile(r"draft(_step_\d+)?\.")
"""Before the keys of a speculative draft model, which SGLang adds (from 0.5.23 on with a number); it is not trained."""
_NO_ACTION = "Unsupported action"
"""SGLang's words for an action that nobody has taught it."""
_AWAY = "leave --check-weight-update-equal away"
_PLUGIN = f"start it with slime's plugin for SGLang on its PYTHONPATH (docs/engines/weight-check.md), or {_AWAY}"

Piece = tuple[tuple[int, ...], tuple[int, ...], int, str]
"""Size, stride and offset in the contiguous trained tensor, and the checksum of what is served there."""


class Unverifiable(EngineError):
    """The server cannot tell what it serves; asking again will not help."""


@dataclass
class Finding:
    """What is wrong with one server's weights; empty when nothing is."""

    tensors: list[str] = field(default_factory=list)
    """HF names that it serves otherwise than trained, or in part, or not at all."""
    extra: list[str] = field(default_factory=list)
    """Names of its own parameters that no trained tensor fills."""

    @property
    def names(self) -> list[str]:
        """All of them, to tell people."""
        return [*self.tensors, *(f"{name} (a parameter that no trained tensor fills)" for name in self.extra)]


class Trained:
    """A bucket of trained tensors, and checksums of parts of them, each computed once for all servers."""

    def __init__(self, run: Sequence[Named]) -> None:
        self.tensors = {name: tensor.detach() for name, tensor in run}
        self._known: dict[tuple[Any, ...], str] = {}

    def equals(self, name: str, piece: Piece) -> bool:
        """Whether the elements are served as they were trained."""
        size, stride, offset, served = piece
        dtype = checksum_dtype(served)
        key = (name, size, stride, offset, dtype)
        if key not in self._known:
            flat = self.tensors[name].contiguous().reshape(-1)
            last = offset + sum((n - 1) * step for n, step in zip(size, stride))
            if not 0 <= offset <= last < flat.numel():
                return False
            self._known[key] = tensor_checksum(flat.as_strided(size, stride, flat.storage_offset() + offset).to(dtype))
        return self._known[key] == served

    def covered(self, name: str, pieces: Sequence[Piece]) -> bool:
        """Whether the pieces hold every element."""
        total = self.tensors[name].numel()
        places = {(size, stride, offset) for size, stride, offset, _ in pieces}
        counts = [torch.Size(size).numel() for size, _, _ in places]
        if sum(counts) < total:
            return False
        held = torch.zeros(total, dtype=torch.bool)
        for size, stride, offset in places:
            once = tuple(n if step else 1 for n, step in zip(size, stride))  # where one element was spread over many
            held.as_strided(once, stride, offset).fill_(True)
        return bool(held.all())


class Reader:
    """One server, through a comparison."""

    def __init__(self, http: Http, worker: Worker, timeout: float) -> None:
        self._http, self._worker, self._timeout = http, worker, timeout
        self._wrong: list[str] = []

    async def ask(self, run: Sequence[Named]) -> Mapping[str, Sequence[Piece]]:
        """Where it holds the tensors of a bucket. Raises EngineError."""
        raise NotImplementedError

    def judge(self, trained: Trained, served: Mapping[str, Sequence[Piece]]) -> None:
        """Compare a bucket."""

        def right(name: str) -> bool:
            pieces = served.get(name, ())
            return all(trained.equals(name, piece) for piece in pieces) and trained.covered(name, pieces)

        with ThreadPoolExecutor(_THREADS) as threads:  # hashing lets go of the interpreter
            results = list(threads.map(right, trained.tensors))
        self._wrong += [name for name, is_right in zip(trained.tensors, results) if not is_right]

    def finding(self) -> Finding:
        """After the last bucket."""
        return Finding(sorted(self._wrong))


class WholeTensors(Reader):
    """A server of ours, which has HF's tensors and tells all checksums at once."""

    def __init__(self, http: Http, worker: Worker, timeout: float, checksums: Mapping[str, str]) -> None:
        super().__init__(http, worker, timeout)
        self._checksums = checksums
        self._asked: set[str] = set()

    async def ask(self, run: Sequence[Named]) -> Mapping[str, Sequence[Piece]]:
        """As they were told at the beginning."""
        self._asked.update(name for name, _ in run)
        return {
            name: [(tuple(t.shape), _row_major(t.shape), 0, self._checksums[name])]
            for name, t in run
            if name in self._checksums
        }

    def finding(self) -> Finding:
        """With the tensors that are served and were not trained."""
        return Finding(sorted(self._wrong), sorted(self._checksums.keys() - self._asked))


class _Process(NamedTuple):
    """What one process of a server tells."""

    pieces: dict[str, list[Piece]]
    """HF name -> what it holds of it."""
    parameters: tuple[str, ...]
    """All that its model has."""
    written: tuple[str, ...]
    """Those that the names asked for fill."""
    stale: tuple[str, ...]
    """Those that differ from what its loader computes without trained tensors."""
    refused: str
    """Why it does not tell; empty when it does."""


class Fused(Reader):
    """A server with slime's plugin; `software` is its SGLang's version."""

    def __init__(self, http: Http, worker: Worker, timeout: float, software: str) -> None:
        super().__init__(http, worker, timeout)
        self._software = software
        self._unfilled: dict[int, set[str]] = {}
        """Of each process of the server."""
        self._stale: set[str] = set()

    async def probe(self) -> None:
        """Find out whether it can, and which parameters it has. Raises EngineError, Unverifiable."""
        for number, process in enumerate(await self._processes([])):
            self._unfilled[number] = set(process.parameters)
        if not self._unfilled:
            raise Unverifiable(f"{self._worker.url} does not tell what it serves; {_PLUGIN}")

    async def ask(self, run: Sequence[Named]) -> Mapping[str, Sequence[Piece]]:
        """The pieces of all its processes. Raises EngineError, Unverifiable."""
        wanted = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in run]
        served: dict[str, list[Piece]] = {}
        for number, process in enumerate(await self._processes(wanted)):
            self._unfilled.setdefault(number, set()).difference_update(process.written)
            self._stale.update(process.stale)
            for name, found in process.pieces.items():
                served.setdefault(name, []).extend(found)
        return served

    async def _processes(self, wanted: list[Any]) -> list[_Process]:
        """What each process tells. Raises EngineError, Unverifiable."""
        url, body = self._worker.url, {"action": ACTION + json.dumps(wanted)}
        reply = await self._http.send(
            "POST", url, "/weights_checker", body, timeout=self._timeout, accept=(400, 404, 405)
        )
        answer = reply.object()
        if reply.status != 200 or answer.get("success") is False or "ranks" not in answer:
            said = str(answer.get("message") or f"HTTP {reply.status}")
            what_now = _PLUGIN if _NO_ACTION in said or not answer.get("message") else f"{tested()}; or {_AWAY}"
            raise Unverifiable(f"{url} cannot tell what it serves ({said[:300]}); {what_now}")
        what = "one parallelism_info (from 0.5.23 on a list of them) and checksums by name of each rank"
        with expecting(what, f"{url}/weights_checker", answer, self._software):
            stages = [int(place["pp_size"]) for rank in answer["ranks"] for place in _places(rank)]
            processes = [_process(rank["checksums"]) for rank in answer["ranks"]]
        if max(stages, default=1) > 1:
            raise Unverifiable(f"{url} is pipeline-parallel; only its first stage tells what it serves. L{_AWAY[1:]}")
        for process in processes:
            if process.refused:
                raise Unverifiable(f"{url} cannot tell what it serves: {process.refused}. L{_AWAY[1:]}")
        return processes

    def finding(self) -> Finding:
        """With the parameters that nothing was loaded into."""
        unfilled = set().union(*self._unfilled.values())
        return Finding(sorted(self._wrong), sorted(unfilled | self._stale))


async def reader_of(http: Http, worker: Worker, timeout: float) -> Reader:
    """Raises EngineError, Unverifiable."""
    facts = await server_facts(http, worker.url)
    if facts.is_sglang:
        reader = Fused(http, worker, timeout, facts.software)
        await reader.probe()
        return reader
    answer = (await http.send("POST", worker.url, "/weights_checker", {"action": "checksum"}, timeout=timeout)).object()
    if not isinstance(answer.get("checksums"), dict):
        raise Unverifiable(f"{worker.url} does not tell checksums of its weights; {_AWAY}")
    return WholeTensors(http, worker, timeout, answer["checksums"])


def _places(rank: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Where a process stands; from SGLang 0.5.23 on it says so once for each model that it runs."""
    told = rank["parallelism_info"]
    return [told] if isinstance(told, Mapping) else list(told)


def _process(checksums: Mapping[str, str]) -> _Process:
    """What `read_back` in the server made of one process's model."""
    told = {name: json.loads(text) for name, text in checksums.items() if not _DRAFT.match(name)}
    facts = told.pop(_FACTS)
    pieces = {
        name: [(tuple(size), tuple(stride), int(offset), str(checksum)) for size, stride, offset, checksum in found]
        for name, found in told.items()
    }
    if "refused" in facts:
        return _Process({}, (), (), (), str(facts["refused"]))
    return _Process(pieces, tuple(facts["parameters"]), tuple(facts["written"]), tuple(facts["stale"]), "")


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
