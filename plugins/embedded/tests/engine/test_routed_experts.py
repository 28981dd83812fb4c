"""The embedded engine on a mixture of experts: log-probs, and the experts it says it used, against transformers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from slime_embedded.engine.core import CoreOptions, EngineCore
from slime_embedded.engine.engine import EmbeddedEngine
from slime_embedded.engine.sequence import Sequence
from slime_serving.native import serve_in_loop
from slime_testing_contracts.tiny import tiny_model, tiny_moe_model

from slime_core.config import Args
from slime_core.errors import EngineError
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import read_weights
from slime_core.sample import Sample
from slime_core.weights.sync import tensor_checksum

PROMPT = [3, 4, 5, 6, 7, 8] * 5
PARAMS = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
SPARSE = [0, 2]


@pytest.fixture(scope="module")
def hf_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_moe_model(), attn_implementation="eager").eval()


def expected(model: Any, tokens: list[int]) -> tuple[np.ndarray, torch.Tensor]:
    """Sorted experts [tokens - 1, sparse layers, 2] and log-probs [tokens, vocabulary] of transformers."""
    with torch.no_grad():
        output = model(torch.tensor([tokens]), output_router_logits=True)
    chosen = [logits.topk(2, dim=-1).indices.sort(-1).values for logits in output.router_logits]
    return torch.stack(chosen, 1).numpy()[:-1], torch.log_softmax(output.logits[0], -1)


def core(**options: Any) -> EngineCore:
    config = load_model_config(tiny_moe_model())
    return EngineCore(config, read_weights(tiny_moe_model()), options=CoreOptions(**options))


def finish(engine: EngineCore) -> None:
    for _ in range(2000):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("requests left after 2000 steps")


def check(engine: EngineCore, sequence: Sequence, model: Any) -> None:
    experts, log_probs = expected(model, sequence.tokens)
    found = np.asarray(engine.routed_experts(sequence))
    assert found.shape == (len(sequence.tokens) - 1, 3, 2)
    np.testing.assert_array_equal(np.sort(found[:, SPARSE]), experts)
    assert (found[:, 1] == -1).all(), "a dense layer"
    start = len(sequence.prompt_ids)
    own = log_probs[start - 1 : -1].gather(1, torch.tensor(sequence.output_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sequence.log_probs), own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_fresh_shared_and_continued_prompts(batch_invariant: bool, hf_model: Any) -> None:
    engine = core(batch_invariant=batch_invariant)
    sequences = [engine.add_request([*PROMPT, 9 + i % 2], PARAMS, f"r{i}") for i in range(5)]
    finish(engine)
    turns = [engine.add_request([*s.tokens, 20, 21], PARAMS, f"turn of {s.rid}") for s in sequences[:2]]
    finish(engine)
    assert any(s.cached_tokens for s in sequences), "siblings share their prompt"
    assert all(s.cached_tokens >= len(PROMPT) for s in turns), "a turn finds the one before it in the cache"
    for sequence in [*sequences, *turns]:
        check(engine, sequence, hf_model)


def test_preempted_sequences_keep_their_rows(hf_model: Any) -> None:
    """A budget of three rows of 64 tokens for six requests that outgrow theirs."""
    engine = core(max_tokens=192)
    params = {**PARAMS, "max_new_tokens": 50}
    sequences = [engine.add_request([*PROMPT[: 6 + i], 9], params, f"r{i}") for i in range(6)]
    finish(engine)
    for sequence in sequences:
        check(engine, sequence, hf_model)


def test_tokens_keep_the_experts_of_the_weights_that_sampled_them() -> None:
    engine = core()
    sequence = engine.add_request(PROMPT, {**PARAMS, "max_new_tokens": 20}, "r")
    for _ in range(8):
        engine.step()
    before = np.asarray(engine.routed_experts(sequence)).copy()
    other = {n: w * (-1.0 if "mlp.gate" in n else 1.0) for n, w in read_weights(tiny_moe_model())}
    engine.update_weights(other.items(), 1, "test")
    engine.pause("retract")  # everything is computed again, with the new weights
    engine.resume()
    finish(engine)
    after = np.asarray(engine.routed_experts(sequence))
    np.testing.assert_array_equal(after[: len(before)], before)
    checksums = engine.weight_checksums()
    assert all(checksums[name] == tensor_checksum(tensor) for name, tensor in other.items())


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def engine_of(directory: Path, **args: Any) -> EmbeddedEngine:
    return EmbeddedEngine(Args(hf_checkpoint=str(directory), num_threads=1, **args))


def test_they_come_when_the_run_replays_them_or_when_asked_for(loop: asyncio.Runner) -> None:
    async def use(asked: bool | None, **args: Any) -> bool:
        engine = engine_of(tiny_moe_model(), **args)
        await engine.start()
        try:
            output = await engine.generate(PROMPT, PARAMS, return_routed_experts=asked)
            streamed = [o.meta_info async for o in engine.stream(PROMPT, PARAMS, return_routed_experts=asked)]
        finally:
            await engine.stop()
        assert ("routed_experts" in streamed[-1]) == ("routed_experts" in output.meta_info)
        assert not any("routed_experts" in meta for meta in streamed[:-1])
        return "routed_experts" in output.meta_info

    assert not loop.run(use(None))
    assert loop.run(use(True))
    assert loop.run(use(None, use_rollout_routing_replay=True))


def test_a_dense_model_has_none(loop: asyncio.Runner) -> None:
    async def use() -> None:
        engine = engine_of(tiny_model())
        await engine.start()
        try:
            with pytest.raises(EngineError, match="the model served is dense"):
                await engine.generate(PROMPT, PARAMS, return_routed_experts=True)
        finally:
            await engine.stop()

    loop.run(use())


@pytest.mark.parametrize("start", [0, 4, len(PROMPT)])
def test_over_http_as_sglang_sends_them(loop: asyncio.Runner, start: int, hf_model: Any) -> None:
    async def use() -> tuple[dict[str, Any], httpx.Response]:
        engine = engine_of(tiny_moe_model())
        await engine.start()
        host, port, stop = await serve_in_loop(engine, "127.0.0.1", 0)
        try:
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=30, trust_env=False) as client:
                body = {"input_ids": PROMPT, "sampling_params": PARAMS, "return_logprob": True}
                asked = {"return_routed_experts": True, "routed_experts_start_len": start}
                answer = await client.post("/generate", json=body | asked)
                wrong = await client.post("/generate", json=body | asked | {"routed_experts_start_len": 99})
                return answer.json(), wrong
        finally:
            await stop()
            await engine.stop()

    answer, wrong = loop.run(use())
    assert wrong.status_code == 400
    assert "routed_experts_start_len is 99" in wrong.text
    meta, ids = answer["meta_info"], answer["output_ids"]
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4")
    rows = len(PROMPT) + len(ids) - 1 - start
    experts, _ = expected(hf_model, PROMPT + ids)
    np.testing.assert_array_equal(np.sort(flat.reshape(rows, 3, 2)[:, SPARSE]), experts[start:])
    sample = Sample(tokens=list(PROMPT))
    log_probs = [entry[0] for entry in meta["output_token_logprobs"]]
    sample.append_response_tokens(Args(hf_checkpoint=str(tiny_moe_model())), ids, log_probs, meta_info=meta)
    assert np.asarray(sample.rollout_routed_experts)[start:].tolist() == flat.reshape(rows, 3, 2).tolist()


def test_in_bfloat16_the_experts_are_those_of_that_precision() -> None:
    config = load_model_config(tiny_moe_model())
    engine = EngineCore(config, read_weights(tiny_moe_model()), dtype=torch.bfloat16)
    sequence = engine.add_request(PROMPT, PARAMS, "r")
    finish(engine)
    found = np.asarray(engine.routed_experts(sequence))[:, SPARSE]
    assert ((found >= 0) & (found < 8)).all()
    assert (found[..., 0] != found[..., 1]).all()
