"""The core that batches requests, and the engine that drives it, against transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded import kernels
from slime_embedded.engine.core import EngineCore
from slime_embedded.engine.engine import EmbeddedEngine
from slime_embedded.engine.fused_runner import FusedRunner, kernels_for
from slime_embedded.engine.sequence import Sequence
from slime_embedded.models.decoder import Decoder

from slime_core.config.schema import Args
from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import read_weights
from slime_core.weights.sync import tensor_checksum
from tests.embedded_cores import make_core, prompts, run
from tests.tiny_models import VARIANTS

MakeModel = Callable[..., tuple[Path, Any]]


def hf_log_probs(model: Any, sequence: Sequence, temperature: float = 1.0) -> torch.Tensor:
    logits = model(torch.tensor([sequence.tokens])).logits[0].double() / temperature
    scores = logits.log_softmax(-1)[len(sequence.prompt_ids) - 1 : -1]
    return scores.gather(1, torch.tensor(sequence.output_ids)[:, None]).squeeze(1)


def assert_parity(model: Any, sequences: list[Sequence], temperature: float = 1.0) -> None:
    for sequence in sequences:
        expected = hf_log_probs(model, sequence, temperature)
        torch.testing.assert_close(
            torch.tensor(sequence.log_probs, dtype=torch.float64), expected, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("choice", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
def test_log_probs_and_greedy_tokens_are_those_of_transformers(
    make_model: MakeModel, variant: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = make_model(variant)
    monkeypatch.setattr(kernels, "_choice", choice)
    core = make_core(directory)
    assert isinstance(core.runner, FusedRunner) == (choice == "auto")
    greedy = run(core, prompts(6), {"temperature": 0, "max_new_tokens": 30})
    assert_parity(model, greedy)
    for sequence in greedy[:3]:
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([sequence.prompt_ids]), max_new_tokens=30, min_new_tokens=30, do_sample=False
            )
        best = expected[0, len(sequence.prompt_ids) :].tolist()
        # HF cannot emit EOS here; compare up to where greedy decoding would have.
        end = sequence.output_ids.index(1) if 1 in sequence.output_ids else 30
        assert sequence.output_ids[:end] == best[:end]
    sampled = run(core, prompts(6, seed=1), {"temperature": 0.7, "max_new_tokens": 100})
    assert_parity(model, sampled, temperature=0.7)


def test_with_the_c_function_a_sequence_has_the_same_bits_alone_and_among_others(make_model: MakeModel) -> None:
    directory, _ = make_model("qwen3", num_attention_heads=6, num_key_value_heads=2)
    params = [{"max_new_tokens": 70, "sampling_seed": i} for i in range(9)]
    together = run(make_core(directory), prompts(9), *params)
    for i in (0, 5):
        (alone,) = run(make_core(directory, prefix_cache=False), prompts(9)[i : i + 1], params[i])
        assert (alone.tokens, alone.log_probs) == (together[i].tokens, together[i].log_probs)


@pytest.mark.parametrize("change", [{"head_dim": 8}, {"hidden_size": 72}, {"moe": object()}, "bfloat16", "exact"])
def test_what_the_c_function_does_not_know_is_computed_by_torch(make_model: MakeModel, change: Any) -> None:
    config, cpu = load_model_config(make_model("qwen3")[0]), torch.device("cpu")
    assert kernels_for(config, cpu, torch.float32, False) is not None
    dtype = torch.bfloat16 if change == "bfloat16" else torch.float32
    changed = replace(config, **change) if isinstance(change, dict) else config
    assert kernels_for(changed, cpu, dtype, change == "exact") is None


def test_many_lengths_few_rows_small_budget(make_model: MakeModel) -> None:
    directory, model = make_model("qwen3")
    params = [{"max_new_tokens": n, "sampling_seed": n} for n in (3, 90, 1, 200, 40, 7, 130, 64, 65, 63, 128, 2)]
    wanted = run(make_core(directory), prompts(12, high=150), *params)
    assert_parity(model, wanted)
    for options in ({"max_running": 3}, {"max_tokens": 512}, {"max_tokens": 700, "prefix_cache": False}):
        core = make_core(directory, **options)
        got = run(core, prompts(12, high=150), *params)
        assert [s.tokens for s in got] == [s.tokens for s in wanted]
        assert_parity(model, got)
        assert core.scheduler.cache.used_tokens == 0
        assert [s.finish["length"] for s in got if s.finish] == [len(s.log_probs) for s in got]


def test_group_shares_the_prompt_and_next_turn_reuses_the_answer(make_model: MakeModel) -> None:
    directory, model = make_model("llama")
    core = make_core(directory)
    prompt = prompts(1, low=50, high=51)[0]
    group = run(core, [prompt] * 4, {"max_new_tokens": 30})
    assert [s.cached_tokens for s in group] == [0, 50, 50, 50]
    assert_parity(model, group)
    turn = [*group[2].tokens, 11, 12, 13]
    second = core.add_request(turn, {"max_new_tokens": 10}, "turn2")
    while core.has_work:
        core.step()
    assert second.cached_tokens == len(group[2].tokens) - 1
    assert_parity(model, [second])
    core.flush_cache()
    third = run(core, [turn], {"max_new_tokens": 1})[0]
    assert third.cached_tokens == 0


def test_long_prompts_go_through_in_pieces(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_embedded.engine import model_runner

    monkeypatch.setattr(model_runner, "PREFILL_TOKENS", 48)
    directory, model = make_model("qwen3")
    got = run(make_core(directory), prompts(6, low=20, high=300), {"max_new_tokens": 5})
    assert_parity(model, got)


def test_top_log_probs(make_model: MakeModel) -> None:
    core, prompt = make_core(make_model("qwen3")[0]), prompts(1, low=30, high=31)[0]
    top = run(core, [prompt], {"max_new_tokens": 3, "temperature": 0}, top_logprobs=4)[0]
    assert [len(t) for t in top.top] == [4, 4, 4]
    assert [t[0][1] for t in top.top] == top.output_ids
    assert [t[0][0] for t in top.top] == pytest.approx(top.log_probs, abs=1e-5)


def test_bad_requests_are_refused_and_leave_nothing(make_model: MakeModel) -> None:
    directory, _ = make_model("qwen3")
    core = make_core(directory)
    bad: list[tuple[list[Any], dict[str, Any], str]] = [
        ([5, 97], {}, "97"),
        ([5, -1], {}, "-1"),
        ([5, "6"], {}, "'6'"),
        ([5] * 512, {}, "512"),
        ([5], {"stop": ["x"]}, "tokenizer"),
        ([5], {"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens"),
    ]
    for prompt, params, word in bad:
        with pytest.raises(EngineError, match=word):
            core.add_request(prompt, params, "x")
    assert not core.has_work
    core.add_request([5], {}, "x")
    with pytest.raises(EngineError, match="already running"):
        core.add_request([5], {}, "x")


def test_answers_end_at_the_context(make_model: MakeModel) -> None:
    directory, model = make_model("qwen3", max_position_embeddings=80)
    got = run(make_core(directory), prompts(3, low=30, high=79), {"max_new_tokens": 500})
    assert [len(s.tokens) for s in got] == [80, 80, 80]
    assert_parity(model, got)


def test_a_version_number_that_comes_again_has_other_weights(make_model: MakeModel) -> None:
    directory, model = make_model("qwen3", seed=1)
    _, new_model = make_model("qwen3", seed=2)
    core, prompt = make_core(directory), prompts(1, low=30, high=31)[0]
    core.update_weights(new_model.state_dict().items(), 5, "test")
    running = core.add_request(prompt, {"max_new_tokens": 20}, "b")
    core.step()
    core.update_weights_from_disk(directory, 5)
    while core.has_work:
        core.step()
    assert run(core, [running.tokens], {"max_new_tokens": 5})[0].cached_tokens == 0
    core.update_weights_from_disk(directory, 6)
    assert_parity(model, run(core, [prompt], {"max_new_tokens": 20}))


@pytest.mark.parametrize("variant", ["qwen3-untied", "llama-biases"])
def test_checksums_are_those_of_the_hf_tensors(make_model: MakeModel, variant: str) -> None:
    directory, _ = make_model(variant)
    expected = {name: tensor_checksum(tensor) for name, tensor in read_weights(directory)}
    assert make_core(directory).weight_checksums() == expected


def test_diverged_weights_fail_the_requests_and_good_ones_heal(make_model: MakeModel) -> None:
    directory, model = make_model("qwen3")
    core = make_core(directory)
    good = {k: v.detach().clone() for k, v in model.state_dict().items()}
    core.update_weights([(k, torch.full_like(v, float("nan"))) for k, v in good.items()], 1, "test")
    failed = run(core, prompts(3), {"max_new_tokens": 5})
    assert all(s.error is not None and "not finite" in s.error for s in failed)
    core.update_weights(good.items(), 2, "test")
    assert_parity(model, run(core, prompts(4, seed=3), {"max_new_tokens": 40}))


def test_bfloat16_is_close(make_model: MakeModel) -> None:
    directory, model = make_model("qwen3")
    core = EngineCore(load_model_config(directory), read_weights(directory), dtype=torch.bfloat16)
    for sequence in run(core, prompts(4), {"max_new_tokens": 40}):
        expected = hf_log_probs(model, sequence)
        assert (torch.tensor(sequence.log_probs) - expected).abs().mean() < 0.05


def test_prompt_log_probs_reuse_the_prefix_before_them(make_model: MakeModel) -> None:
    directory, model = make_model("qwen3")
    core = make_core(directory)
    prompt = prompts(1, low=60, high=61)[0]
    run(core, [prompt], {"max_new_tokens": 4})
    with torch.inference_mode():
        scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for start, cached, new in ((59, 59, 4), (40, 40, 4), (3, 0, 0)):
        scored = run(core, [prompt], {"max_new_tokens": new}, logprob_start=start)[0]
        assert scored.cached_tokens == cached
        expected = [scores[i - 1, prompt[i]].item() for i in range(start + 1, 60)]
        assert scored.prompt_log_probs == pytest.approx(expected, abs=1e-5)
        assert_parity(model, [scored])
    # Asked for nothing of the prompt but its end, as a client that wants the answer's log-probs does: still a group.
    core.flush_cache()
    group = run(core, [prompt] * 3, {"max_new_tokens": 4}, logprob_start=59)
    assert [s.cached_tokens for s in group] == [0, 60, 60]
    assert_parity(model, group)


@pytest.mark.slow
def test_random_interleavings_give_the_tokens_of_one_request_at_a_time(make_model: MakeModel) -> None:
    directory, _ = make_model("qwen3", max_position_embeddings=256)
    rng = random.Random(0)
    alone = make_core(directory, prefix_cache=False)
    for options in ({}, {"max_running": 3}, {"max_tokens": 256}, {"max_tokens": 576, "max_running": 5}):
        core = make_core(directory, **options)
        stems = prompts(3, seed=4, low=10, high=150)
        sequences: list[Sequence] = []
        while len(sequences) < 16 or core.has_work:
            event = rng.random()
            if event < 0.3 and len(sequences) < 16:
                stem = rng.choice([*stems, *(s.tokens for s in sequences if s.finish)])[: rng.randint(1, 200)]
                params = {"max_new_tokens": rng.choice([1, 5, 60]), "sampling_seed": rng.randrange(2**63)}
                params |= rng.choice([{"top_k": 5}, {"temperature": 0.5}, {"min_p": 0.1}, {"frequency_penalty": 0.5}])
                names = (f"r{len(sequences) + i}" for i in range(rng.choice([1, 4])))
                sequences += [core.add_request(stem, params, name) for name in names]
            elif event < 0.35:
                core.pause("retract")
                core.resume()
            elif event < 0.4:
                core.flush_cache()
            else:
                core.step()
        for sequence in sequences:
            wanted = run(alone, [sequence.prompt_ids], {"max_new_tokens": 1} | vars(sequence.params))[0]
            assert sequence.tokens == wanted.tokens
            assert sequence.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)


@pytest.mark.parametrize("torn", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_torn_on_disk_change_nothing(make_model: MakeModel, tmp_path: Path, torn: str) -> None:
    directory, _ = make_model("qwen3")
    core = make_core(directory)
    before = core.weight_checksums()
    (tmp_path / torn).write_bytes((directory / "model.safetensors").read_bytes()[:2000])
    with pytest.raises(WeightSyncError, match=f"{torn}.*old weights still serve"):
        core.update_weights_from_disk(tmp_path, 9)
    assert core.weight_checksums() == before


def make_engine(directory: Path, step_in_thread: bool = False, **args: Any) -> EmbeddedEngine:
    return EmbeddedEngine(Args(hf_checkpoint=str(directory), **args), step_in_thread=step_in_thread)


async def test_the_driver_steps_only_when_it_may_and_does_not_spin(make_model: MakeModel) -> None:
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
        ({"hf_checkpoint": str(directory), "engine_max_context_len": 0}, "--engine-max-context-len 0: must be"),
        ({"hf_checkpoint": str(directory), "num_threads": 0}, "--num-threads 0: must be at least 1"),
        ({"hf_checkpoint": str(directory), "device": "gpu"}, "--device gpu: allowed are auto, cpu, cuda"),
    ):
        with pytest.raises(ConfigError, match=word):
            await EmbeddedEngine(Args.model_construct(**args)).start()
    with pytest.raises(EngineError, match="start"):
        await make_engine(directory).generate([5], {})


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_tokens_after_an_update_are_those_of_the_new_weights_where_requests_are_retracted(
    make_model: MakeModel, mode: str
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
    if mode == "abort":
        assert {output.meta_info["finish_reason"]["type"] for output in outputs} == {"abort"}
        assert {v for output in outputs for v in output.meta_info["token_weight_versions"]} == {0}
        return
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
