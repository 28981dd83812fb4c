"""New weights for a real vLLM server: every transport, requests in flight, refusals, and what the check notices.

The model's head is tied to its embedding, of which vLLM's own reload on CPU keeps the old copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_engine_http.weights.shared_memory import SharedBuffer
from slime_engine_vllm.engine import VllmEngine
from slime_engine_vllm.weights import VllmUpdates
from slime_testing_contracts import engine_reference as reference
from slime_testing_contracts.tiny import tiny_model

from slime_core.errors import WeightSyncError
from slime_core.models.hf_io import copy_assets, write_weights
from tests.backends.vllm.conftest import Started

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1800)]

PROMPT = [11, 9, 4, 12, 7]
PARAMS = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
LONG = {**PARAMS, "max_new_tokens": 450}
NEW = 1.25
"""Factor of the new weights; log-probs of other weights differ by more than a tenth."""
NAMED = Callable[[VllmEngine, Mapping[str, torch.Tensor], int, Path], Awaitable[Any]]


async def by_disk(engine: VllmEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> Any:
    path = folder / f"v{version}"
    path.mkdir()
    copy_assets(tiny_model(), path)
    write_weights(path, iter(weights.items()), shard_bytes=400_000)
    assert len(list(path.glob("*.safetensors"))) > 1
    return await engine.update_weights_from_disk(path, version)


async def by_tensor(engine: VllmEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> Any:
    return await engine.update_weights_from_tensor(weights.items(), version)


async def by_broadcast(engine: VllmEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> Any:
    return await engine.update_weights_from_distributed(weights.items(), version)


def run(started: Started, use: Callable[[VllmEngine], Awaitable[Any]], **flags: Any) -> Any:
    """The model's own weights are served again at the end."""

    async def inside() -> Any:
        async with started(**flags) as engine:
            try:
                return await use(engine)
            finally:
                await engine.weights.from_tensors(reference.weights().items(), 99)

    return asyncio.run(inside())


def gap(output: Any, scale: float, tokens: slice = slice(None)) -> float:
    expected = reference.log_probs(PROMPT, output.token_ids, scale=scale).tolist()
    return max(abs(a - b) for a, b in zip(output.log_probs[tokens], expected[tokens], strict=True))


@pytest.mark.parametrize("push", [by_tensor, by_broadcast, by_disk])
def test_new_weights_come_in_several_parts(started: Started, tmp_path: Path, push: NAMED) -> None:
    async def use(engine: VllmEngine) -> None:
        old = await engine.generate(PROMPT, PARAMS)
        assert gap(old, 1.0) < 5e-5
        for version, scale in ((1, NEW), (2, 1.0), (3, NEW)):
            metrics = await push(engine, reference.weights(scale), version, tmp_path)
            new = await engine.generate(PROMPT, PARAMS)
            assert gap(new, scale) < 5e-5
            assert new.meta_info["token_weight_versions"] == [version] * 24
            assert (await engine.info())["weight_version"] == str(version)
            assert metrics["perf/update_weights_pause_time"] > 0
        assert gap(old, NEW) > 0.1

    run(started, use, update_weight_buffer_size=150_000)


@pytest.mark.parametrize("mode", [None, "retract", "in_place", "abort"])
def test_requests_in_flight_tell_the_version_of_each_token(started: Started, tmp_path: Path, mode: str | None) -> None:
    """Exact log-probs after "retract" and "abort"; "in_place" goes on with keys and values of the old weights."""

    async def use(engine: VllmEngine) -> Any:
        await by_tensor(engine, reference.weights(), 1, tmp_path)
        tasks = [asyncio.create_task(engine.generate(PROMPT, LONG)) for _ in range(2)]
        stream = engine.stream(PROMPT, LONG)
        async for output in stream:
            if len(output.token_ids) > 20:
                break
        await by_tensor(engine, reference.weights(NEW), 2, tmp_path)
        await stream.aclose()  # type: ignore[attr-defined]
        return await asyncio.gather(*tasks)

    flags = {} if mode is None else {"update_weight_pause_mode": mode}
    for output in run(started, use, **flags):
        versions = output.meta_info["token_weight_versions"]
        assert len(output.token_ids) == len(versions) == 450
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
        cut = versions.index(2)
        assert gap(output, 1.0, slice(0, cut)) < 5e-5
        exact = gap(output, NEW, slice(cut, None))
        assert exact < 5e-5 if mode != "in_place" else exact > 1e-3


@pytest.mark.parametrize("push", [by_tensor, by_broadcast, by_disk])
def test_weights_that_lack_a_tensor_are_refused(started: Started, tmp_path: Path, push: NAMED) -> None:
    """By disk old weights go on serving; otherwise layers are complete when the tensor turns out to be missing."""

    async def inside() -> None:
        changed = reference.weights(NEW)
        del changed["model.norm.weight"]
        async with started() as engine:
            with pytest.raises(WeightSyncError, match=r"lacks model\.norm\.weight"):
                await push(engine, changed, 1, tmp_path)
            if push is by_disk:
                assert gap(await engine.generate(PROMPT, PARAMS), 1.0) < 5e-5
            else:
                assert not engine.pool.ready
        async with started() as engine:  # as the next run finds it
            await by_tensor(engine, reference.weights(), 99, tmp_path)
            assert gap(await engine.generate(PROMPT, PARAMS), 1.0) < 5e-5

    asyncio.run(inside())


@pytest.mark.parametrize("buffer", [1 << 30, 150_000])
def test_memory_that_is_not_whole_is_refused(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int
) -> None:
    """The last bucket is short: old weights go on serving unless the buckets before it were loaded."""
    push = VllmUpdates.push_shared

    async def spoiled(self: Any, *sent: Any, last: bool) -> None:
        with monkeypatch.context() as patch:
            if last:
                patch.setattr(SharedBuffer, "offset", 1 << 30)
            await push(self, *sent, last=last)

    async def inside() -> None:
        async with started(update_weight_buffer_size=buffer) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(VllmUpdates, "push_shared", spoiled)
                with pytest.raises(WeightSyncError, match="is shorter than"):
                    await by_tensor(engine, reference.weights(NEW), 1, tmp_path)
            if buffer > 150_000:
                assert gap(await engine.generate(PROMPT, PARAMS), 1.0) < 5e-5
            else:
                assert not engine.pool.ready
        async with started() as engine:  # as the next run finds it
            await by_tensor(engine, reference.weights(), 99, tmp_path)
            assert gap(await engine.generate(PROMPT, PARAMS), 1.0) < 5e-5

    asyncio.run(inside())


@pytest.mark.parametrize("layer", [1, 7])
def test_a_server_that_runs_out_of_memory_serves_the_next_update(
    started: Started, tmp_path: Path, out_of_memory: Path, layer: int
) -> None:
    """vLLM's reload leaves a layer without memory then, and the copies of later updates go nowhere."""

    async def inside() -> None:
        async with started() as engine:
            out_of_memory.write_text(str(layer))
            with pytest.raises(WeightSyncError, match=r"MemoryError: planted.*; a part was written"):
                await by_tensor(engine, reference.weights(NEW), 1, tmp_path)
            assert not out_of_memory.exists()
            assert not engine.pool.ready
        async with started() as engine:
            for version, scale in ((98, NEW), (99, 1.0)):
                await by_tensor(engine, reference.weights(scale), version, tmp_path)
                assert gap(await engine.generate(PROMPT, PARAMS), scale) < 5e-5

    asyncio.run(inside())


def test_the_check_compares_what_is_served(started: Started, tmp_path: Path) -> None:
    async def use(engine: VllmEngine) -> None:
        await by_tensor(engine, reference.weights(NEW), 1, tmp_path)
        assert await engine.differing_weights(reference.weights(NEW).items()) == []
        assert gap(await engine.generate(PROMPT, PARAMS), NEW) < 5e-5
        wrong = reference.weights(NEW)
        wrong["model.layers.1.mlp.up_proj.weight"] += 1e-3
        with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.gate_up_proj\.weight otherwise than trained"):
            await engine.differing_weights(wrong.items())
        assert not engine.pool.ready

    async def inside() -> None:
        async with started(check_weight_update_equal=True) as engine:
            await use(engine)
        async with started() as engine:
            await by_tensor(engine, reference.weights(), 99, tmp_path)

    asyncio.run(inside())


def shared_memory() -> Iterator[Path]:
    return Path("/dev/shm").glob("torch_*")


def test_no_shared_memory_is_left(started: Started, tmp_path: Path) -> None:
    before = set(shared_memory())

    async def use(engine: VllmEngine) -> None:
        await by_tensor(engine, reference.weights(), 1, tmp_path)

    run(started, use)
    assert set(shared_memory()) - before == set()
