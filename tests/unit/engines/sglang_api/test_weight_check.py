"""Trained weights against servers that fuse and shard them; the servers' plugin answers, in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_sglang.weights.buckets import Buffers
from slime_engine_sglang.weights.check import WeightCheck, compare
from slime_engine_sglang.weights.readers import ACTION, Finding
from slime_engine_sglang.weights.round import Round
from slime_engine_sglang.weights.update import Kept

from slime_core.config import Args
from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.models.hf_io import write_weights
from slime_core.weights.checksum import tensor_checksum
from tests.unit.engines.sglang.fused_model import FusedModel, Shape, ranks, read_back, unchanged
from tests.unit.engines.sglang_api.servers import Reaction, Server, engine_at, servers, well


class Fused:
    """A server with slime's plugin, as a `Reaction`."""

    def __init__(self, models: list[FusedModel], **told: Any) -> None:
        self.models, self.told = models, {"version": "0.5.20"} | told
        self.requests = 0

    async def __call__(self, server: Server | None, request: Any, body: Any, before: int) -> Any:
        if request.path == "/server_info":
            return self.told
        if request.path != "/weights_checker":
            return {"success": True}
        self.requests += 1
        wanted = json.loads(body["action"].removeprefix(ACTION))
        info = {"tp_size": len(self.models), "pp_size": self.told.get("pp_size", 1)}
        answers = [read_back.read_back(model, wanted) for model in self.models]
        return {"success": True, "ranks": [{"checksums": a, "parallelism_info": info} for a in answers]}


class Direct:
    """In `Http`'s place, without a network in between."""

    def __init__(self, reaction: Fused) -> None:
        self.reaction = reaction

    async def send(self, method: str, url: str, path: str, body: Any = None, **_: Any) -> Any:
        value = await self.reaction(None, SimpleNamespace(path=path), body, 0)
        return SimpleNamespace(status=200, object=lambda: value)

    async def first(self, url: str, paths: Sequence[str], **_: Any) -> Any:
        return await self.send("GET", url, paths[0])


async def found_at(
    models: list[FusedModel], trained: dict[str, torch.Tensor], *, bucket_bytes: int = 10**9, **told: Any
) -> Finding:
    worker = Worker("http://one", state=WorkerState.READY)
    http: Any = Direct(Fused(models, **told))
    result = (await compare(http, [worker], trained.items(), bucket_bytes=bucket_bytes, timeout=5))[worker]
    assert isinstance(result, Finding), result
    return result


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    tp = draw(st.sampled_from([1, 2, 4]))
    return Shape(
        tp=tp,
        heads=tp * draw(st.integers(1, 2)),
        kv_heads=draw(st.sampled_from([n for n in (1, 2, 4) if n % tp == 0 or tp % n == 0])),
        head_dim=draw(st.integers(1, 3)),
        hidden=draw(st.integers(1, 5)),
        ffn=tp * draw(st.integers(1, 3)),
        experts=draw(st.integers(1, 3)),
        vocab=draw(st.integers(1, 40)),
        padding=draw(st.sampled_from([1, 4, 8])),
        tied=draw(st.booleans()),
        turned=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(shape=shapes(), data=st.data(), bucket=st.sampled_from([1, 100, 10**9]))
async def test_any_layout_is_read_back_and_any_element_that_differs_is_found(
    shape: Shape, data: st.DataObject, bucket: int
) -> None:
    trained = shape.trained()
    models = ranks(shape, trained)
    before = [model.contents() for model in models]
    views = {name: torch.stack([t, t])[1] for name, t in trained.items()}  # parts of a larger storage, as in buckets
    assert await found_at(models, views, bucket_bytes=bucket) == Finding()
    assert all(all(unchanged(m, b)) for m, b in zip(models, before))
    name = data.draw(st.sampled_from(sorted(trained)))
    at = data.draw(st.integers(0, trained[name].numel() - 1))
    other = {n: t.clone() for n, t in trained.items()}
    other[name].view(-1)[at] += 1
    assert await found_at(models, other, bucket_bytes=bucket) == Finding([name])


@settings(max_examples=40, deadline=None)
@given(shape=shapes(), data=st.data())
async def test_an_element_that_a_server_lost_is_found(shape: Shape, data: st.DataObject) -> None:
    trained = shape.trained()
    models = ranks(shape, trained)
    model = models[data.draw(st.integers(0, shape.tp - 1))]
    label, parameter = data.draw(st.sampled_from([(n, p) for n, p in model.named_parameters() if "weight" not in n]))
    at = data.draw(st.integers(0, parameter.numel() - 1))
    parameter.view(-1)[at] += 1
    (name,) = (await found_at(models, trained)).tensors
    expected = {"qkv": "qkv", "o": "o", "norm": "n", "scale": "s", "w13": "e", "w2": "e"}[label]
    assert name[0] in expected


async def test_what_a_server_does_not_hold() -> None:
    shape = Shape(tp=2)
    trained = shape.trained()
    models = ranks(shape, trained)
    half = await found_at(models[:1], trained)
    assert "norm.weight" not in half.tensors  # every rank has it
    assert {"o.weight", "experts.1.up", "q.weight"} <= set(half.tensors)
    more = await found_at(models, trained | {"nobody.knows": torch.ones(2)})
    assert more == Finding(["nobody.knows"])
    less = await found_at(models, {k: v for k, v in trained.items() if k != "norm.weight"})
    assert less == Finding([], ["norm"])
    assert less.names == ["norm (a parameter that no trained tensor fills)"]


async def test_a_tied_layer_is_compared_with_what_it_shares() -> None:
    shape = Shape()
    trained = shape.trained()
    models = ranks(shape, trained)
    tied = trained | {"head.weight": trained["embed.weight"]}
    assert await found_at(models, tied) == Finding()
    assert await found_at(models, tied, bucket_bytes=1) == Finding()  # asked for apart
    other = trained | {"head.weight": trained["embed.weight"] + 1}
    assert await found_at(models, other) == Finding(["head.weight"])


async def test_an_element_that_is_spread_over_a_parameter() -> None:
    class Spreading(FusedModel):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, loaded in weights:
                self.norm.data.copy_(loaded)

    model, trained = Spreading(Shape()), {"norm.weight": torch.tensor([3.0])}
    model.load_weights(trained.items())
    assert (await found_at([model], trained)).tensors == []
    assert (await found_at([model], {"norm.weight": torch.tensor([4.0])})).tensors == ["norm.weight"]


def whole(tensors: dict[str, torch.Tensor]) -> Reaction:
    """A server of slime."""

    async def react(server: Server, request: Any, body: Any, before: int) -> Any:
        if request.path == "/server_info":
            return {"version": "slime 0.1.0"}
        if request.path == "/weights_checker":
            return {"success": True, "checksums": {n: tensor_checksum(t.bfloat16()) for n, t in tensors.items()}}
        return {"success": True}

    return react


async def without_plugin(server: Server, request: Any, body: Any, before: int) -> Any:
    """SGLang's own words."""
    if request.path == "/server_info":
        return {"version": "0.5.20"}
    if request.path == "/weights_checker":
        return 400, {"success": False, "message": f"Unsupported action='{body['action']}'"}
    return {"success": True}


@asynccontextmanager
async def checking(*reactions: Reaction, awaited: bool = False, **args: Any) -> AsyncIterator[tuple[Any, WorkerPool]]:
    async with servers(*reactions) as running:
        pool = WorkerPool([Worker(s.url, awaited=awaited, state=WorkerState.READY) for s in running])
        http = Http()
        await http.open()
        try:
            settings_ = Args(check_weight_update_equal=True, update_weight_timeout=5.0, **args)
            yield WeightCheck(http, pool, settings_), pool
        finally:
            await http.close()


async def test_the_server_that_differs_is_named_and_quarantined() -> None:
    shape = Shape()
    trained = shape.trained()
    good, bad, ours = Fused(ranks(shape, trained)), Fused(ranks(shape, trained)), whole(trained)
    bad.models[0].norm[2] += 1
    async with checking(good, bad, ours) as (check, pool):
        one, two, three = pool.workers
        assert await check.differing(trained.items()) == [f"norm.weight ({two.url})"]
        assert [w.state for w in (one, two, three)] == [WorkerState.READY, WorkerState.QUARANTINED, WorkerState.READY]
        assert two.reason == "it serves norm.weight otherwise than trained"
        assert await check.differing(trained.items()) == []


async def test_under_fault_tolerance_the_others_go_on() -> None:
    shape = Shape()
    trained = shape.trained()
    bad = Fused(ranks(shape, shape.trained(seed=1)))
    async with checking(bad, awaited=True, use_fault_tolerance=True) as (check, pool):
        assert await check.differing(trained.items()) == []
        (worker,) = pool.workers
        assert worker.state is WorkerState.QUARANTINED
        assert "and 8 more" in worker.reason
    async with checking(bad, awaited=False, use_fault_tolerance=True) as (check, pool):
        assert len(await check.differing(trained.items())) == len(trained)  # nobody brings it back


async def test_a_server_that_does_not_answer_is_no_silent_success() -> None:
    trained = Shape().trained()
    good, silent = Fused(ranks(Shape(), trained)), Fused(ranks(Shape(), trained))

    async def dies(server: Server, request: Any, body: Any, before: int) -> Any:
        if request.path == "/weights_checker" and before >= 1:
            return 500, {"message": "lost a scheduler"}
        return await silent(server, request, body, before)

    async with checking(good, dies) as (check, pool):
        one, two = pool.workers
        with pytest.raises(WeightSyncError, match="could not be read back") as raised:
            await check.differing(trained.items())
        assert two.url in str(raised.value)
        assert one.state is WorkerState.READY
        assert two.state is WorkerState.QUARANTINED


async def test_a_server_that_cannot_tell_is_refused_at_the_start() -> None:
    trained = Shape().trained()
    good = Fused(ranks(Shape(), trained))
    async with checking(good, whole(trained)) as (check, _):
        await check.require()
    async with checking(Fused(ranks(Shape(), trained), pp_size=2)) as (check, _):
        with pytest.raises(ConfigError, match="pipeline-parallel"):
            await check.require()
    quantized = ranks(Shape(), trained)
    quantized[0].o = torch.nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)
    async with checking(Fused(quantized)) as (check, _):
        with pytest.raises(ConfigError, match="parameter o is int8: quantized"):
            await check.require()


async def test_the_engine_asks_at_its_start_only_when_it_will_need_it() -> None:
    async with servers(without_plugin) as (server,):
        async with engine_at(server):
            assert server.asked("/weights_checker") == []
        with pytest.raises(ConfigError, match="--check-weight-update-equal"):
            async with engine_at(server, check_weight_update_equal=True):
                pass


async def nothing(_: Round) -> None:
    """These are not sent."""


@pytest.fixture(params=["buckets", "directory"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    trained = Shape().trained()
    if request.param == "directory":
        write_weights(tmp_path, trained.items())
        yield Kept(3, "disk", nothing, directory=tmp_path)
    else:
        buffers = Buffers(shared=False, keep=True)
        last = Kept(3, "tensor", nothing, buckets=[buffers.fill(list(trained.items())[i::2]) for i in range(2)])
        yield last
        last.free()


async def test_a_server_that_comes_back_is_compared_with_what_was_kept(kept: Kept) -> None:
    trained = Shape().trained()
    server = Fused(ranks(Shape(), trained))
    async with checking(server) as (check, pool):
        (worker,) = pool.workers
        await check.one(worker, kept.named())
        server.models[0].qkv[0, 0] += 1
        with pytest.raises(WeightSyncError, match=r"serves q\.weight otherwise"):
            await check.one(worker, kept.named())
    async with checking(well) as (check, pool):
        with pytest.raises(EngineError, match="does not tell checksums"):
            await check.one(pool.workers[0], kept.named())


def test_deltas_are_not_kept_here() -> None:
    assert Kept(3, "delta", nothing).named() is None
