"""What real SGLang servers serve, compared with what was trained by the checksums that they tell."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_engine_http.api.engine import HttpEngine
from slime_engine_http.api.worker import WorkerState
from slime_engine_sglang.engine import SglangEngine
from slime_testing_contracts.tiny import tiny_moe_model

from slime_core.errors import WeightSyncError
from slime_core.models.hf_io import copy_assets, read_weights, write_weights
from tests.backends.conftest import Running

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

Weights = dict[str, torch.Tensor]


def weights_of(model: Path, seed: int | None = None) -> Weights:
    """Those of the directory, changed at random where a seed is given."""
    weights = dict(read_weights(model))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        weights = {n: t + 0.05 * torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in weights.items()}
    return weights


def with_one_element_changed(weights: Weights, name: str) -> Weights:
    changed = weights | {name: weights[name].clone()}
    changed[name].view(-1)[-1] += 1
    return changed


@asynccontextmanager
async def connected(running: Running) -> AsyncIterator[HttpEngine]:
    """An engine that compares, and brings nothing back; afterwards the servers hold the model's own weights."""
    args = copy.copy(running.args)
    args.check_weight_update_equal, args.update_weight_buffer_size = True, 50_000
    engine = HttpEngine(args)
    try:
        await engine.start()
        assert engine._supervisor is not None
        await asyncio.to_thread(engine._supervisor.stop)
        yield engine
    finally:
        for worker in engine.pool.workers:
            engine.pool.set_state(worker, WorkerState.READY)
        await engine.update_weights_from_disk(running.model, 10_000)
        await engine.stop()


async def test_every_transport_and_one_element_that_differs(sglang_server: Running, tmp_path: Path) -> None:
    async with connected(sglang_server) as engine:
        (worker,) = engine.pool.workers
        new = weights_of(sglang_server.model, seed=1)
        copy_assets(sglang_server.model, tmp_path)
        write_weights(tmp_path, new.items())

        def drawn() -> Iterator[tuple[str, torch.Tensor]]:
            yield from new.items()

        updates: list[Callable[[int], Any]] = [
            lambda version: engine.update_weights_from_tensor(drawn(), version),
            lambda version: engine.update_weights_from_distributed(drawn(), version),
            lambda version: engine.update_weights_from_disk(tmp_path, version),
        ]
        for version, update in enumerate(updates, start=1):
            await engine.update_weights_from_tensor(weights_of(sglang_server.model, seed=9).items(), 10 * version)
            await update(10 * version + 1)
            assert await engine.differing_weights(drawn()) == []
        tied = {"lm_head.weight": new["model.embed_tokens.weight"]}
        assert await engine.differing_weights((new | tied).items()) == []
        for name, served in {
            "model.layers.1.self_attn.v_proj.weight": "model.layers.1.self_attn.qkv_proj.weight",
            "model.layers.0.mlp.gate_proj.weight": "model.layers.0.mlp.gate_up_proj.weight",
        }.items():
            await engine.update_weights_from_tensor(with_one_element_changed(new, name).items(), 50)
            with pytest.raises(WeightSyncError, match=f"{worker.url}: it serves {served} otherwise than trained"):
                await engine.differing_weights(drawn())
            assert worker.state is WorkerState.QUARANTINED
            engine.pool.set_state(worker, WorkerState.READY)
            await engine.resume()


async def test_experts_on_two_ranks_in_bfloat16(sglang_args: Callable[..., Any], tmp_path: Path) -> None:
    """Fused and sharded: w13 and w2 of all experts, and query, key and value in one."""
    model = tiny_moe_model(dense_layer=False)
    flags = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "sglang_dtype": "bfloat16"}
    args = sglang_args(model, tmp_path, no_engine_router=True, check_weight_update_equal=True, **flags)
    engine = SglangEngine(args)
    try:
        await engine.start()
        new = weights_of(model, seed=3)
        await engine.update_weights_from_tensor(new.items(), 1)
        assert await engine.differing_weights(new.items()) == []
        name = next(name for name in new if "experts.1.up_proj" in name)
        await engine.update_weights_from_tensor(with_one_element_changed(new, name).items(), 2)
        with pytest.raises(WeightSyncError, match=r"experts\.w13_weight otherwise than trained"):
            await engine.differing_weights(new.items())
    finally:
        await engine.stop()
