"""One behaviour, two ways to reach it: the same tests in process and over HTTP against a server process."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_core.engines.embedded.engine import EmbeddedEngine
from slime_core.engines.sglang_api.engine import HttpEngine
from slime_core.errors import EngineError, WeightSyncError
from slime_core.types import GenerationOutput
from tests.tiny_models import byte_tokenizer, make_model, make_text_model, one_thread

__all__ = ["byte_tokenizer", "make_model", "make_text_model", "one_thread"]
Models = Callable[..., tuple[Path, Any]]
SERVE = "import sys; from slime_core.cli.main import main; sys.exit(main(sys.argv[1:]))"

pytestmark = pytest.mark.slow  # the contract of engines asks the same of both in tests/contracts


@pytest.fixture(scope="module")
def old(make_text_model: Models) -> tuple[Path, Any]:
    return make_text_model("qwen3", seed=1, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def new(make_text_model: Models) -> tuple[Path, Any]:
    return make_text_model("qwen3", seed=2, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def server(old: tuple[Path, Any]) -> Iterator[str]:
    """Address of `slime serve` in its own process."""
    command = [sys.executable, "-c", SERVE, "serve", "--hf-checkpoint", str(old[0]), "--port", "0"]
    process = subprocess.Popen([*command, "--num-threads", "1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("slime: serving"), line
    yield line.rsplit("/", 1)[-1].strip()
    process.terminate()
    assert process.wait(timeout=60) == 0
    process.stdout.close()


@pytest.fixture(params=["in-process", "http"])
async def engine(request: pytest.FixtureRequest, old: tuple[Path, Any]) -> AsyncIterator[EmbeddedEngine | HttpEngine]:
    made: EmbeddedEngine | HttpEngine
    if request.param == "http":
        address = request.getfixturevalue("server")
        made = HttpEngine(SimpleNamespace(rollout_external_engine_addrs=[address], rollout_timeout=60.0))
    else:
        made = EmbeddedEngine(SimpleNamespace(hf_checkpoint=str(old[0]), num_threads=1))
    await made.start()
    await made.resume()
    await made.update_weights_from_disk(old[0], 0)
    yield made
    await made.abort()
    await made.stop()
    await made.stop()


def check_log_probs(model: Any, prompt: list[int], output: GenerationOutput, temperature: float = 1.0) -> None:
    ids = torch.tensor([prompt + output.token_ids])
    with torch.inference_mode():
        scores = (model(ids).logits[0].double() / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    expected = scores.gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
    assert output.log_probs == pytest.approx(expected.tolist(), abs=1e-5)


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition with a deadline."""
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.01)


def running(engine: EmbeddedEngine | HttpEngine) -> Callable[[], Any]:
    async def condition() -> bool:
        return int((await engine.info())["num_running"]) > 0

    return condition


async def test_log_probs_are_those_of_transformers(engine: EmbeddedEngine, old: tuple[Path, Any]) -> None:
    prompt = list(range(10, 40))
    outputs = await asyncio.gather(
        *(engine.generate(prompt, {"max_new_tokens": 30, "sampling_seed": i, "temperature": 0.8}) for i in range(8))
    )
    assert len({tuple(o.token_ids) for o in outputs}) == 8
    for output in outputs:
        check_log_probs(old[1], prompt, output, 0.8)
        assert output.meta_info["prompt_tokens"] == 30
        assert output.meta_info["completion_tokens"] == len(output.token_ids)
        assert output.meta_info["weight_version"] == "0"
        assert output.meta_info["token_weight_versions"] == [0] * len(output.token_ids)


async def test_a_seed_gives_the_same_tokens_every_time(engine: EmbeddedEngine) -> None:
    params = {"max_new_tokens": 20, "sampling_seed": 11, "ignore_eos": True}
    one = await engine.generate([5, 6, 7], params, session_id="s")
    other, *_ = await asyncio.gather(
        engine.generate([5, 6, 7], params), *(engine.generate([9, i], {"max_new_tokens": 9}) for i in range(3, 9))
    )
    assert one.token_ids == other.token_ids
    assert one.meta_info["finish_reason"] == {"type": "length", "length": 20}


async def test_stop_rules(engine: EmbeddedEngine) -> None:
    base = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, "skip_special_tokens": False}
    free = await engine.generate([5, 6, 7], base)
    stop_id = free.token_ids[6]
    by_id = await engine.generate([5, 6, 7], base | {"stop_token_ids": [stop_id]})
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(stop_id) + 1]
    assert by_id.meta_info["finish_reason"] == {"type": "stop", "matched": stop_id}
    assert len(by_id.log_probs) == len(by_id.token_ids)
    kept = await engine.generate([5, 6, 7], base | {"stop_token_ids": [stop_id], "no_stop_trim": True})
    assert len(kept.text) > len(by_id.text)


async def test_stop_strings_may_span_tokens(engine: EmbeddedEngine) -> None:
    # One token per byte, so a stop string of three letters always spans three tokens.
    base = {"max_new_tokens": 400, "ignore_eos": True, "sampling_seed": 3}
    free = await engine.generate([5, 6, 7], base)
    at = next(i for i in range(20, len(free.text) - 3) if free.text[i : i + 3].isascii())
    stop = free.text[at : at + 3]
    at = free.text.index(stop)
    cut = await engine.generate([5, 6, 7], base | {"stop": ["never there", stop]})
    assert cut.text == free.text[:at]
    assert cut.meta_info["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    kept = await engine.generate([5, 6, 7], base | {"stop": stop, "no_stop_trim": True})
    assert kept.text == free.text[: at + 3]
    assert kept.token_ids == cut.token_ids


async def test_abort_returns_what_there_is(engine: EmbeddedEngine, old: tuple[Path, Any]) -> None:
    params = {"max_new_tokens": 4000, "ignore_eos": True}
    tasks = [asyncio.create_task(engine.generate([5, 6, i], params, rid=f"long-{i}")) for i in range(3, 6)]
    await until(running(engine))
    await engine.abort("long-3")
    first = await asyncio.wait_for(tasks[0], 60)
    assert first.meta_info["finish_reason"]["type"] == "abort"
    assert 0 < len(first.token_ids) < 4000
    check_log_probs(old[1], [5, 6, 3], first)
    await engine.abort("nobody")
    await engine.abort()
    others = await asyncio.wait_for(asyncio.gather(*tasks[1:]), 60)
    assert {o.meta_info["finish_reason"]["type"] for o in others} == {"abort"}


async def test_a_cancelled_caller_leaves_no_request_behind(engine: EmbeddedEngine) -> None:
    task = asyncio.create_task(engine.generate([5, 6], {"max_new_tokens": 4000, "ignore_eos": True}))
    await until(running(engine))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()

    async def empty() -> bool:
        return int((await engine.info())["num_running"]) == 0

    await until(empty)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pause_holds_and_resume_goes_on(engine: EmbeddedEngine, mode: str) -> None:
    params = {"max_new_tokens": 1500, "sampling_seed": 4, "ignore_eos": True}
    wanted = await engine.generate([5, 6, 7], params)
    task = asyncio.create_task(engine.generate([5, 6, 7], params))
    await until(running(engine))
    await engine.pause(mode)
    late = asyncio.create_task(engine.generate([5, 6, 7], {"max_new_tokens": 3}))
    before = (await engine.info())["num_generated_tokens"]
    await asyncio.sleep(0.1)
    assert (await engine.info())["num_generated_tokens"] == before
    assert not task.done()
    assert not late.done()
    await engine.resume()
    assert (await asyncio.wait_for(task, 60)).token_ids == wanted.token_ids
    assert len((await asyncio.wait_for(late, 60)).token_ids) == 3


async def test_pause_abort_ends_what_runs(engine: EmbeddedEngine) -> None:
    task = asyncio.create_task(engine.generate([5, 6, 7], {"max_new_tokens": 4000, "ignore_eos": True}))
    await until(running(engine))
    await engine.pause("abort")
    output = await asyncio.wait_for(task, 60)
    assert output.meta_info["finish_reason"]["type"] == "abort"


async def test_weights_change_in_mid_generation(
    engine: EmbeddedEngine, old: tuple[Path, Any], new: tuple[Path, Any]
) -> None:
    task = asyncio.create_task(engine.generate([5, 6, 7], {"max_new_tokens": 2000, "ignore_eos": True}))
    await until(running(engine))
    await engine.pause("in_place")
    await engine.update_weights_from_disk(new[0], 7)
    await engine.resume()
    output = await asyncio.wait_for(task, 60)
    versions = output.meta_info["token_weight_versions"]
    switch = versions.index(7)
    assert 0 < switch < 2000
    assert versions == [0] * switch + [7] * (2000 - switch)
    assert output.meta_info["weight_version"] == "7"
    before = GenerationOutput(output.token_ids[:switch], output.log_probs[:switch], "", {})
    check_log_probs(old[1], [5, 6, 7], before)
    prompt = list(range(10, 60))
    check_log_probs(new[1], prompt, await engine.generate(prompt, {"max_new_tokens": 20}))
    assert (await engine.info())["weight_version"] == "7"


async def test_wrong_weights_are_refused_and_the_old_ones_serve(
    engine: EmbeddedEngine, old: tuple[Path, Any], make_text_model: Models, tmp_path: Path
) -> None:
    before = await engine.weight_checksums()
    other, _ = make_text_model("qwen3", seed=3, num_hidden_layers=1)
    for directory in (other, tmp_path):
        with pytest.raises(WeightSyncError):
            await engine.update_weights_from_disk(directory, 9)
    assert await engine.weight_checksums() == before
    check_log_probs(old[1], [5, 6], await engine.generate([5, 6], {"max_new_tokens": 5}))


async def test_streams_are_cumulative(engine: EmbeddedEngine) -> None:
    params = {"max_new_tokens": 30, "sampling_seed": 8, "ignore_eos": True}
    whole = await engine.generate([5, 6, 7], params)
    chunks = [chunk async for chunk in engine.stream([5, 6, 7], params)]
    assert len(chunks) > 3
    for one, two in itertools.pairwise(chunks):
        assert two.token_ids[: len(one.token_ids)] == one.token_ids
        assert two.text.startswith(one.text)
        assert one.meta_info["finish_reason"] is None
    assert chunks[-1].token_ids == whole.token_ids
    assert chunks[-1].text == whole.text
    assert chunks[-1].log_probs == pytest.approx(whole.log_probs, abs=1e-5)
    assert chunks[-1].meta_info["finish_reason"] == {"type": "length", "length": 30}


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ([], {}, "input_ids"),
        ([5, 100_000], {}, "100000"),
        ([5] * 4096, {}, "4096"),
        ([5], {"temprature": 1.0}, "temperature"),
        ([5], {"top_p": 7}, "top_p"),
        ([5], {"max_new_tokens": "many"}, "max_new_tokens"),
    ],
)
async def test_bad_requests(engine: EmbeddedEngine, prompt: list[int], params: dict[str, Any], word: str) -> None:
    with pytest.raises(EngineError, match=word):
        await engine.generate(prompt, params)
    with pytest.raises(EngineError, match=word):
        _ = [chunk async for chunk in engine.stream(prompt, params)]
    assert len((await engine.generate([5], {"max_new_tokens": 2, "ignore_eos": True})).token_ids) == 2


async def test_bad_pause_mode(engine: EmbeddedEngine) -> None:
    with pytest.raises(EngineError, match="in_place"):
        await engine.pause("sideways")


async def test_unknown_server_is_an_engine_error() -> None:
    engine = HttpEngine(SimpleNamespace(rollout_external_engine_addrs=["127.0.0.1:9"], rollout_timeout=5.0))
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        await engine.start()
