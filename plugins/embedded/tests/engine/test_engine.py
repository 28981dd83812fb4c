from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded.engine.engine import EmbeddedEngine
from slime_embedded.models.decoder import Decoder

from slime_core.config.schema import Args
from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import read_weights

MakeModel = Callable[..., tuple[Path, Any]]


def make_engine(directory: Path, step_in_thread: bool = False, **args: Any) -> EmbeddedEngine:
    return EmbeddedEngine(Args(hf_checkpoint=str(directory), **args), step_in_thread=step_in_thread)


async def test_the_driver_steps_only_when_it_may(make_model: MakeModel) -> None:
    engine = make_engine(make_model()[0])
    await engine.start()
    waiting = 0
    engine.may_step = lambda: waiting >= 2
    first = asyncio.create_task(engine.generate([5, 6], {"max_new_tokens": 3, "ignore_eos": True}))
    waiting = 1
    for _ in range(20):
        await asyncio.sleep(0)
        engine.notify()
    assert (await engine.info())["num_generated_tokens"] == 0
    waiting = 2
    engine.notify()
    assert len((await asyncio.wait_for(first, 60)).token_ids) == 3
    await engine.stop()


async def test_an_idle_driver_does_not_spin(make_model: MakeModel) -> None:
    engine = make_engine(make_model()[0])
    await engine.start()
    asked = 0

    def may_step() -> bool:
        nonlocal asked
        asked += 1
        return False

    engine.may_step = may_step
    task = asyncio.create_task(engine.generate([5], {"max_new_tokens": 1}))
    await asyncio.sleep(0.05)
    assert asked == 1
    await engine.stop()
    assert (await task).meta_info["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("step_in_thread", [False, True])
async def test_runs_repeat_exactly(make_model: MakeModel, step_in_thread: bool) -> None:
    directory, _ = make_model()

    async def run() -> list[tuple[list[int], list[float]]]:
        engine = make_engine(directory, step_in_thread, rollout_seed=5)
        await engine.start()
        calls = (engine.generate([5, i], {"max_new_tokens": 5 + i, "ignore_eos": True}) for i in range(12))
        outputs = await asyncio.gather(*calls)
        await engine.stop()
        return [(o.token_ids, o.log_probs) for o in outputs]

    first, second = await run(), await run()
    if step_in_thread:
        # Requests may join at different steps, which changes log-probs in the last digit only.
        assert [t for t, _ in first] == [t for t, _ in second]
    else:
        assert first == second


async def test_weights_from_tensors_while_stepping_in_a_thread(make_model: MakeModel) -> None:
    directory, model = make_model(seed=1)
    _, new = make_model(seed=2)
    engine = make_engine(directory, step_in_thread=True)
    await engine.start()
    task = asyncio.create_task(engine.generate([5, 6], {"max_new_tokens": 500, "ignore_eos": True}))
    for version in range(1, 6):
        await asyncio.sleep(0.01)
        await engine.update_weights_from_tensor((new if version % 2 else model).state_dict().items(), version)
    versions = (await task).meta_info["token_weight_versions"]
    assert versions == sorted(versions)
    assert len(versions) == 500
    with pytest.raises(WeightSyncError):
        await engine.update_weights_from_tensor([], 9)
    assert (await engine.info())["weight_version"] == "5"
    await engine.stop()


@pytest.mark.parametrize("error", [RuntimeError, pytest.fail.Exception])  # the second is no Exception
async def test_a_step_that_raises_fails_the_callers(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    engine = make_engine(make_model()[0])
    await engine.start()
    assert engine.core is not None

    def broken(*_: Any) -> torch.Tensor:
        raise error("out of memory")

    monkeypatch.setattr(engine.core.runner, "logits", broken)
    with pytest.raises(EngineError, match="out of memory"):
        await asyncio.wait_for(engine.generate([5], {}), 60)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate([5], {})
    await engine.stop()


async def test_settings_that_cannot_work_say_so(make_model: MakeModel, tmp_path: Path) -> None:
    directory, _ = make_model()
    for args, word in (
        ({"hf_checkpoint": str(tmp_path)}, "config.json"),
        ({"hf_checkpoint": str(directory), "engine_max_tokens": 5}, "--engine-max-tokens"),
    ):
        with pytest.raises(ConfigError, match=word):
            await EmbeddedEngine(Args.model_construct(**args)).start()
    with pytest.raises(EngineError, match="start"):
        await make_engine(directory).generate([5], {})


async def test_a_stream_that_is_left_early_leaves_no_task(make_model: MakeModel) -> None:
    engine = make_engine(make_model()[0])
    await engine.start()
    before = asyncio.all_tasks()

    async def read() -> None:
        async for _ in engine.stream([5], {"max_new_tokens": 400, "ignore_eos": True}):
            await engine.pause()

    task = asyncio.create_task(read())
    async with asyncio.timeout(60):
        while not (await engine.info())["paused"]:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while (await engine.info())["num_running"]:
            await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
    await engine.stop()


@pytest.mark.parametrize("mode", [None, "in_place", "retract"])
async def test_tokens_after_an_update_are_those_of_the_new_weights_where_requests_are_retracted(
    make_model: MakeModel, mode: str | None
) -> None:
    """Their log-probs against a plain forward pass of the new weights over the whole response."""
    directory, _ = make_model()
    config = load_model_config(directory)
    generator = torch.Generator().manual_seed(3)
    new = {n: w + 0.3 * w.std() * torch.randn(w.shape, generator=generator) for n, w in read_weights(directory)}
    engine = make_engine(directory, update_weight_pause_mode=mode)
    await engine.start()
    params = {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 1, "temperature": 1.0}
    calls = [asyncio.create_task(engine.generate([5 + i, 6, 7], params)) for i in range(3)]
    while (await engine.info())["num_generated_tokens"] < 24:
        await asyncio.sleep(0)
    await engine.update_weights_from_tensor(new.items(), 1)
    outputs = await asyncio.wait_for(asyncio.gather(*calls), 60)
    await engine.stop()
    decoder, gaps = Decoder.from_weights(config, new.items()), []
    for i, output in enumerate(outputs):
        tokens = torch.tensor([5 + i, 6, 7, *output.token_ids])
        with torch.no_grad():
            logits = decoder(tokens, [len(tokens)])[2:-1]
        fresh = torch.log_softmax(logits.float(), -1).gather(1, tokens[3:, None])[:, 0]
        versions = torch.tensor(output.meta_info["token_weight_versions"])
        assert 0 < int((versions == 1).sum()) < len(versions)
        gaps.append((fresh - torch.tensor(output.log_probs)).abs()[versions == 1].max().item())
    if mode == "retract":
        assert max(gaps) < 1e-4
    else:
        assert max(gaps) > 1e-2, "requests go on over the keys and values of the old weights"


async def test_requests_in_flight_end_at_an_update_in_mode_abort(make_model: MakeModel) -> None:
    directory, _ = make_model()
    engine = make_engine(directory, update_weight_pause_mode="abort")
    await engine.start()
    call = asyncio.create_task(engine.generate([5, 6, 7], {"max_new_tokens": 30, "ignore_eos": True}))
    while (await engine.info())["num_generated_tokens"] < 4:
        await asyncio.sleep(0)
    await engine.update_weights_from_tensor(dict(read_weights(directory)).items(), 1)
    output = await asyncio.wait_for(call, 60)
    assert output.meta_info["finish_reason"]["type"] == "abort"
    assert set(output.meta_info["token_weight_versions"]) == {0}
    await engine.stop()
