"""Several adapters, and mixtures of experts, in one engine."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from slime_embedded import kernels
from slime_embedded.engine.adapters import stored
from slime_embedded.engine.core import CoreOptions, EngineCore
from slime_embedded.engine.engine import EmbeddedEngine
from slime_embedded.engine.sequence import Sequence
from slime_embedded.models.lora import LoraSettings, write_adapter
from slime_embedded.models.lora_linear import adapter_weights, add_adapters
from slime_serving.native import serve_in_loop
from slime_testing_contracts.tiny import tiny_model, tiny_moe_model

from slime_core.config import Args
from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import read_weights
from slime_core.sample import Sample
from slime_core.weights.sync import tensor_checksum
from tests.embedded_cores import prompts

MakeModel = Callable[..., tuple[Path, Any]]
Weights = dict[str, torch.Tensor]
NAMES = ("planner", "solver")
KINDS = ("c", "torch", "exact", "mixture")


def changed(base: Weights, seed: int) -> Weights:
    """Other values of the projections that adapters change."""
    generator = torch.Generator().manual_seed(seed)
    own = {name: tensor for name, tensor in base.items() if "proj" in name and ".experts." not in name}
    return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in own.items()}


class Served:
    """Weights of each adapter, an engine that serves all of them, and an engine for each alone."""

    def __init__(self, directory: Path, seed: int = 0, **options: Any) -> None:
        self.config, self.options = load_model_config(directory), options
        self.base = dict(read_weights(directory))
        self.own: dict[str, Weights] = {"": {}} | {name: changed(self.base, seed + i) for i, name in enumerate(NAMES)}
        self.core = EngineCore(self.config, self.sent(), options=CoreOptions(**options), adapters=NAMES)

    def sent(self) -> list[tuple[str, torch.Tensor]]:
        named = [(f"adapters.{n}.{key}", t) for n in NAMES for key, t in self.own[n].items()]
        return [*named[:3], *self.base.items(), *named[3:]]

    def alone(self, name: str) -> EngineCore:
        weights = {**self.base, **self.own[name]}.items()
        return EngineCore(self.config, weights, options=CoreOptions(**self.options, prefix_cache=False))

    def answers(self, asked: list[tuple[str, list[int]]], first: int = 0, **params: Any) -> list[Sequence]:
        sequences = []
        for i, (name, prompt) in enumerate(asked, first):
            given = {"max_new_tokens": 12, **params, "sampling_seed": i}
            sequences.append(self.core.add_request(prompt, given, f"r{i}", adapter=name or None))
        finish(self.core)
        return sequences

    def check(self, sequences: list[Sequence], *, exact: bool) -> None:
        for name in self.own:
            alone = self.alone(name)
            for sequence in (s for s in sequences if s.adapter == name):
                given = {**vars(sequence.params), "sampling_seed": sequence.seed}
                wanted = alone.add_request(sequence.prompt_ids, given, "alone")
                finish(alone)
                assert sequence.tokens == wanted.tokens
                assert sequence.log_probs == (wanted.log_probs if exact else pytest.approx(wanted.log_probs, abs=1e-5))
                if self.config.moe is not None:
                    pair = (self.core.routed_experts(sequence), alone.routed_experts(wanted))
                    np.testing.assert_array_equal(*map(np.asarray, pair))


def finish(core: EngineCore) -> None:
    for _ in range(5000):
        if not core.has_work:
            return
        core.step()
    raise AssertionError("the engine did not finish")


@pytest.fixture
def directory(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    def of(kind: str) -> Path:
        monkeypatch.setattr(kernels, "_choice", "torch" if kind == "torch" else "auto")
        return tiny_moe_model() if kind == "mixture" else make_model("qwen3")[0]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_is_answered_by_its_adapter(directory: Callable[[str], Path], kind: str) -> None:
    served = Served(directory(kind), batch_invariant=kind == "exact")
    stems = [p[:1] * 3 + p for p in prompts(2, low=20, high=40)]
    asked = [(name, stem) for stem in stems for name in ("", *NAMES, "planner", "")]
    first = served.answers(asked)
    served.check(first, exact=kind in ("c", "exact"))
    assert len({tuple(s.output_ids) for s in first}) > 6
    # The next turn of another adapter has the tokens of this one, but not its keys and values.
    turns = [(name, s.tokens[:-1]) for s, name in zip(first, ("solver", "", "planner", "planner", "solver"))]
    again = served.answers(turns, first=len(asked))
    served.check(again, exact=kind in ("c", "exact"))
    reused = [s.cached_tokens for s in again]
    assert min(reused[3], len(turns[3][1]) - 1) > 0, "the same adapter goes on where it ended"


@pytest.mark.parametrize("options", [{"max_tokens": 320}, {"max_running": 2}])
def test_few_rows_and_a_small_budget(make_model: MakeModel, options: dict[str, Any]) -> None:
    served = Served(make_model("qwen3")[0], **options)
    asked = [(("", *NAMES)[i % 3], prompt) for i, prompt in enumerate(prompts(9, high=60))]
    served.check(served.answers(asked, max_new_tokens=70), exact=True)
    assert served.core.scheduler.cache.used_tokens == 0


@pytest.mark.parametrize("kind", ["c", "exact"])
def test_an_update_reaches_every_adapter_or_none(directory: Callable[[str], Path], kind: str) -> None:
    served, other = (Served(directory(kind), seed, batch_invariant=kind == "exact") for seed in (0, 7))
    asked = [(name, [5, 6, 7]) for name in ("", *NAMES)]
    before = [s.tokens for s in served.answers(asked)]
    sums = served.core.weight_checksums()
    assert sums == {name: tensor_checksum(tensor) for name, tensor in served.sent()}
    sent = dict(other.sent())
    first = next(name for name in sent if name.startswith("adapters.solver."))
    for wrong, said in (
        ({**sent, "adapters.judge.x": torch.zeros(1)}, "no adapter 'judge' is served"),
        ({**sent, "adapters.solver.bogus": torch.zeros(1)}, "unknown bogus"),
        ({**sent, first: torch.zeros(2)}, "wrong shape"),
    ):
        with pytest.raises(WeightSyncError, match=said):
            served.core.update_weights(wrong.items(), 2, "test")
    assert served.core.weight_checksums() == sums
    served.core.update_weights(sent.items(), 1, "test")
    after = served.answers(asked, first=10)
    other.check(after, exact=True)
    assert all(s.tokens != old for s, old in zip(after[1:], before[1:]))


def test_memory_is_given_up_and_taken_again(make_model: MakeModel) -> None:
    served = Served(make_model("qwen3")[0])
    held = served.core.memory.nbytes()["weights"]
    served.core.release_memory()
    assert served.core.memory.nbytes()["weights"] < held / 100
    served.core.memory.resume(("weights",))
    served.core.update_weights(served.sent(), 1, "test")
    served.core.memory.resume(("kv_cache",))
    served.check(served.answers([(name, [5, 6, 7]) for name in ("", *NAMES)]), exact=True)


def test_an_unknown_adapter_is_refused(make_model: MakeModel) -> None:
    served = Served(make_model("qwen3")[0])
    with pytest.raises(EngineError, match=r"adapter 'judge' is not served; --lora-adapters has planner, solver"):
        served.answers([("judge", [5])])
    with pytest.raises(EngineError, match=r"adapter 'planner' is not served; --lora-adapters has none"):
        served.alone("").add_request([5], {}, "r", adapter="planner")


def test_adapters_of_a_checkpoint(make_model: MakeModel, tmp_path: Path) -> None:
    from slime_embedded.models.decoder import Decoder

    base, lora = make_model("qwen3")[0], LoraSettings(4, 8.0, ("all-linear",))
    assert list(stored(base, NAMES)) == []
    decoder = Decoder.from_weights(load_model_config(base), read_weights(base))
    add_adapters(decoder, lora, 3)
    modules = [name for name, _ in decoder.named_modules()]
    for name in NAMES:
        for tensor in adapter_weights(decoder).values():
            tensor.normal_(0, 0.1)
        write_adapter(tmp_path / "adapters" / name, lora, adapter_weights(decoder), modules, str(base))
    found = dict(stored(tmp_path, NAMES))
    wanted = {
        f"adapters.solver.{n}.weight": m.merged_weight() for n, m in decoder.named_modules() if hasattr(m, "scale")
    }
    assert {n for n in found if ".solver." in n} == set(wanted)
    assert len(found) == 2 * len(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    with pytest.raises(ConfigError, match=r"--lora-adapters judge: .* has no such adapter; it has planner, solver"):
        list(stored(tmp_path, ["judge"]))


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
