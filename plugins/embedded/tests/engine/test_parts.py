"""Memory, prefix cache, packed matrices, sampling, and text from tokens."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from slime_embedded.engine.kv_cache import KVCache
from slime_embedded.engine.linear import Linear, packed_kernel_works
from slime_embedded.engine.prefix_cache import BLOCK, PrefixCache
from slime_embedded.engine.sampler import SamplingBatch, ScoreTokens, derive_seed, uniforms
from slime_embedded.engine.sampling_params import SamplingParams
from slime_embedded.engine.sequence import Sequence, TextStream, decode
from slime_embedded.kernels import load
from slime_embedded.models.batch_invariant import log_probs_of

from slime_core.errors import EngineError, WeightSyncError
from slime_core.models.config import ModelConfig
from slime_core.models.hf_io import read_weights
from slime_core.weights.sync import tensor_checksum
from tests.embedded_cores import make_core, prompts, run
from tests.sweeps import sweep

CONFIG = ModelConfig("llama", 50, 8, 8, 1, 1, 1, 4, 1e-6, 1e4, None, 4096, False)


def make_cache() -> KVCache:
    return KVCache(CONFIG, torch.device("cpu"), torch.float32, max_tokens=65536, max_context=4096)


def stored(cache: KVCache, tokens: list[int]) -> Sequence:
    """A running sequence whose keys hold its token ids, so a wrong copy is seen."""
    sequence = Sequence("r", list(tokens), SamplingParams(), 0, 10, frozenset())
    cache.arena_for(len(tokens)).place(sequence)
    assert sequence.arena is not None
    values = torch.tensor(tokens, dtype=torch.float32)[None, None, None, :, None]
    sequence.arena.kv[:, :, sequence.row, :, : len(tokens)] = values
    return sequence


def test_matches_agree_with_a_search_through_everything() -> None:
    rng = random.Random(0)
    cache, prefixes = make_cache(), PrefixCache()
    kept: list[list[int]] = []
    for _ in range(60):
        base = rng.choice(kept) if kept and rng.random() < 0.7 else []
        tokens = base[: rng.randrange(len(base) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
        found, length = prefixes.match(tokens, len(tokens) - 1)
        shared = [
            next((i for i, (a, b) in enumerate(zip(k, tokens[:-1])) if a != b), min(len(k), len(tokens) - 1))
            for k in kept
        ]
        best = max(shared, default=0)
        # Blocks decide which owner is found: nothing below one block, and never a block less than the best.
        assert (found is None) == (best < BLOCK)
        assert best - BLOCK < length <= best or found is None
        if found is not None:
            copied = found.read(length)[0, 0, 0, :, 0].tolist()
            assert copied == tokens[:length]
        sequence = stored(cache, tokens)
        prefixes.keep(sequence, 1 << 30)
        if len(tokens) > BLOCK:
            kept.append(tokens[:-1])
        cache.free(sequence)


def test_eviction_is_least_recently_used_and_bounded() -> None:
    cache, prefixes = make_cache(), PrefixCache()
    prompts = [[i] * 41 for i in range(3)]
    for tokens in prompts:
        prefixes.keep(stored(cache, tokens), 120)
    assert prefixes.finished_tokens == 120
    prefixes.match(prompts[0], 40)
    prefixes.keep(stored(cache, [9] * 41), 120)
    assert prefixes.finished_tokens == 120
    assert [prefixes.match(tokens, 40)[1] for tokens in prompts] == [40, 0, 40]
    prefixes.keep(stored(cache, [8] * 200), 120)
    assert prefixes.match([8] * 200, 199)[1] == 0
    prefixes.clear()
    assert prefixes.match(prompts[0], 40) == (None, 0)
    assert prefixes.finished_tokens == 0


@sweep("rows, bias, out, source", product([1, 2, 7, 8, 9, 64, 200], [False, True], [96, 512, 520], ["decode", None]))
def test_every_kernel_gives_the_product_of_the_present_weight(
    rows: int, bias: bool, out: int, source: str | None
) -> None:
    torch.manual_seed(rows)
    weight, offset = torch.randn(out, 256), torch.randn(out) if bias else None
    linear = Linear(weight, offset, kernels=None if source is None else load(source))
    x = torch.randn(rows, 256)
    for _ in range(2):
        _ = linear.pack(weight, weight) or linear.repack()
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-4, rtol=1e-5)
        weight.normal_()


@pytest.mark.parametrize("dtype", [t for t in (torch.float32, torch.bfloat16) if packed_kernel_works(t)])
@pytest.mark.parametrize("shape", [(520, 256), (512, 512)])
@pytest.mark.parametrize("source", ["decode", None])
def test_a_packed_copy_alone_serves_and_is_read_back(
    dtype: torch.dtype, shape: tuple[int, int], source: str | None
) -> None:
    """Meanwhile `weight` holds another projection's numbers."""
    kernels = load(source) if source is not None and dtype == torch.float32 else None
    weight, x = torch.empty(shape, dtype=dtype), torch.randn(1, shape[1]).to(dtype)
    linear = Linear(weight, None, alone=True, kernels=kernels)
    for _ in range(3):
        given = torch.randn(shape).to(dtype)
        if not linear.pack(given, weight):
            weight.copy_(given)
            linear.repack()
        weight.fill_(float("nan"))
        torch.testing.assert_close(linear(x), F.linear(x, given), rtol=1e-2, atol=1e-3)
        linear.unpack()
        assert torch.equal(weight, given)


@pytest.mark.skipif(load("decode") is None, reason="no C compiler")
def test_rows_are_packed_as_a_write_through_the_view_would_lay_them() -> None:
    weight, parts = torch.empty(160, 48), [torch.randn(rows, 48) for rows in (96, 64)]
    linear = Linear(weight, None, alone=True, kernels=load("decode"))
    places = weight[:96].view(2, 24, 2, 48).transpose(1, 2), weight[96:]
    for part, place in zip(parts, places):
        assert linear.pack(part, place)
    linear.unpack()
    for part, place in zip(parts, places):
        assert torch.equal(place.reshape(part.shape), part)


MakeModel = Callable[..., tuple[Path, Any]]
SAMPLED = {"temperature": 0.9, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 5}


@pytest.mark.parametrize("invariant", [False, True], ids=["fused", "batch_invariant"])
def test_freed_and_the_same_bits_afterwards(make_model: MakeModel, invariant: bool) -> None:
    directory, _ = make_model()
    core = make_core(directory, batch_invariant=invariant)
    asked = prompts(6, low=20)
    before = run(core, asked, SAMPLED)
    held = core.memory.nbytes()
    assert min(held.values()) > 0
    core.weight_checksums()
    core.release_memory()
    assert core.memory.nbytes() == {"weights": 0, "kv_cache": 0}
    core.release_memory(["kv_cache"])  # again
    waiting = core.add_request(asked[0], SAMPLED, "waits")
    assert not core.has_work
    core.memory.resume(["weights"])
    assert 0 < core.memory.nbytes()["weights"] <= held["weights"], "packed copies come with the update"
    core.update_weights(read_weights(directory), 1, "test")
    core.memory.resume(["kv_cache"])
    assert core.memory.nbytes()["weights"] == held["weights"]
    while core.has_work:
        core.step()
    assert waiting.output_ids == before[0].output_ids
    core.flush_cache()
    after = run(core, asked, SAMPLED)
    assert [s.output_ids for s in after] == [s.output_ids for s in before]
    assert [s.log_probs for s in after] == [s.log_probs for s in before]


def test_what_would_answer_with_weights_that_are_gone(make_model: MakeModel) -> None:
    directory, _ = make_model()
    core = make_core(directory)
    core.release_memory()
    with pytest.raises(WeightSyncError, match="released; resume_memory"):
        core.update_weights(read_weights(directory), 1, "test")
    with pytest.raises(EngineError, match="the weights are released"):
        core.weight_checksums()
    with pytest.raises(EngineError, match="released and not updated since"):
        core.memory.resume(None)
    core.memory.resume(["weights"])
    with pytest.raises(EngineError, match="released and not updated since"):
        core.memory.resume(["kv_cache"])
    core.update_weights(read_weights(directory), 1, "test")
    core.memory.resume(["kv_cache"])
    assert not core.memory.released
    with pytest.raises(EngineError, match="memory tags 'kv'; allowed: kv_cache, weights"):
        core.release_memory(["kv"])


def test_only_an_idle_engine_gives_its_memory_up(make_model: MakeModel) -> None:
    core = make_core(make_model()[0])
    core.add_request(prompts(1)[0], SAMPLED, "a")
    core.step()
    with pytest.raises(EngineError, match="1 requests are in the engine"):
        core.release_memory()
    assert not core.memory.released


def test_a_large_matrix_is_held_once(make_model: MakeModel) -> None:
    """And not anew with every update; its packed copy is what is served, checked and replaced."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    directory, _ = make_model(hidden_size=512, intermediate_size=768, num_hidden_layers=6, **heads)
    core = make_core(directory)
    weights = dict(read_weights(directory))
    assert core.memory.nbytes()["weights"] < 1.3 * sum(tensor.nbytes for tensor in weights.values())
    trained = {name: tensor + 0.01 for name, tensor in weights.items()}
    core.update_weights(trained.items(), 1, "test")
    assert core.weight_checksums() == {name: tensor_checksum(trained[name]) for name in core.weight_checksums()}


def test_defaults_are_sglangs_and_values_are_normalised() -> None:
    params = SamplingParams.parse({"temperature": None, "stop": None})
    assert params == SamplingParams()
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (128, 1.0, 1.0, -1)
    params = SamplingParams.parse({"stop": "a", "stop_token_ids": [3, 4], "max_new_tokens": 5.0, "temperature": 1})
    assert params.stop == ("a",)
    assert params.stop_token_ids == (3, 4)
    assert params.max_new_tokens == 5
    assert SamplingParams.parse({"stop": ["a", "", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"temprature": 0.5}, ["temprature", "temperature"]),
        ({"top_p": "0.5"}, ["top_p", "'0.5'", "number"]),
        ({"top_p": float("nan")}, ["top_p", "nan"]),
        ({"top_k": 0}, ["top_k", "0", "-1"]),
        ({"ignore_eos": 1}, ["ignore_eos", "true or false"]),
        ({"stop": [1]}, ["stop", "strings"]),
        ({"stop_token_ids": ["a"]}, ["stop_token_ids", "'a'"]),
        ({"repetition_penalty": 1e39}, ["repetition_penalty", "1e+39", "100"]),
    ],
)
def test_mistakes_name_key_value_and_what_is_allowed(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(EngineError) as caught:
        SamplingParams.parse(raw)
    assert all(word in str(caught.value) for word in words)


LOGITS = torch.tensor([0.0, 1.5, -1.0, 0.5, 2.0, -3.0, 0.1])


def sequence(seed: int, prompt: tuple[int, ...] = (1, 2), stop_ids: tuple[int, ...] = (), **params: Any) -> Sequence:
    parsed = SamplingParams.parse(params)
    return Sequence(f"r{seed}", list(prompt), parsed, seed, 10**6, frozenset(stop_ids))


def draw(n: int, logits: torch.Tensor = LOGITS, **params: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch = SamplingBatch([sequence(seed, **params) for seed in range(n)], torch.device("cpu"))
    return batch.sample(logits.expand(n, -1).clone())


def assert_distribution(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's chi-squared at about six sigma; impossible tokens must not appear."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    wanted = expected[possible].double() * len(tokens)
    chi2 = ((counts[possible] - wanted) ** 2 / wanted).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi2 < freedom + 6 * math.sqrt(2 * max(freedom, 1)) + 6


def test_uniforms_are_uniform_and_depend_on_seed_and_position() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    values = uniforms(seeds, np.zeros_like(seeds))
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 19 + 6 * math.sqrt(38)
    by_position = uniforms(np.zeros_like(seeds), seeds)
    assert abs(np.corrcoef(values, by_position)[0, 1]) < 0.03
    assert abs(np.corrcoef(by_position[:-1], by_position[1:])[0, 1]) < 0.03
    assert len({derive_seed(1, i) for i in range(1000)} | {derive_seed(2, i) for i in range(1000)}) == 2000


@pytest.mark.parametrize("temperature", [0.5])
def test_samples_follow_the_scaled_distribution_and_report_its_log_probs(temperature: float) -> None:
    tokens, log_probs = draw(6_000, temperature=temperature)
    expected = torch.softmax(LOGITS.double() / temperature, -1)
    assert_distribution(tokens, expected)
    torch.testing.assert_close(log_probs.double(), expected.log()[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, [4, 1]),
        ({"top_p": 0.5}, [4, 1]),
        ({"top_p": 1e-6}, [4]),
        ({"min_p": 0.2}, [4, 1, 3]),
        ({"top_k": 3, "top_p": 0.99}, [4, 1, 3]),
    ],
)
def test_filters_cut_but_log_probs_are_of_the_full_distribution(params: dict[str, Any], allowed: list[int]) -> None:
    tokens, log_probs = draw(3_000, **params)
    full = torch.softmax(LOGITS.double(), -1)
    cut = torch.zeros_like(full)
    cut[allowed] = full[allowed]
    assert_distribution(tokens, cut / cut.sum())
    torch.testing.assert_close(log_probs.double(), full.log()[tokens], atol=1e-5, rtol=0)


def test_penalties_move_away_from_what_was_said() -> None:
    for params in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 5.0}):
        item = sequence(0, prompt=(0,), temperature=0, **params)
        item.tokens.append(4)
        item.log_probs.append(-1.0)
        token, _ = SamplingBatch([item], torch.device("cpu")).sample(LOGITS[None].clone())
        assert token.item() == 1


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_penalties_are_subtracted_before_the_temperature_divides(temperature: float) -> None:
    items = [sequence(s, temperature=temperature, frequency_penalty=0.5, presence_penalty=0.75) for s in range(20_000)]
    for item in items:
        item.tokens += [4, 4, 1]
        item.log_probs += [-1.0] * 3
    tokens, _ = SamplingBatch(items, torch.device("cpu")).sample(LOGITS.expand(len(items), -1).clone())
    penalised = LOGITS.double()
    penalised[4] -= 0.75 + 2 * 0.5
    penalised[1] -= 0.75 + 0.5
    assert_distribution(tokens, torch.softmax(penalised / temperature, -1))


def test_a_forced_token_of_vanishing_probability_has_a_finite_log_prob() -> None:
    logits = torch.tensor([0.0, 200.0, -1.0])
    item = sequence(0, stop_ids=(1,), min_new_tokens=2, temperature=0)
    token, log_prob = SamplingBatch([item], torch.device("cpu")).sample(logits[None].clone())
    assert (token.item(), log_prob.item()) == (0, pytest.approx(-200.0))


@pytest.mark.parametrize("score", [None, log_probs_of])
@pytest.mark.parametrize("params", [{"top_k": 3, "temperature": 0.7}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_sequences_that_keep_what_they_were_sampled_among(params: dict[str, Any], score: ScoreTokens | None) -> None:
    """Log-probs are of the softmax over it; a neighbour without filters, and a greedy one, are as they were."""
    plain, greedy = sequence(8, temperature=1.0), sequence(9, temperature=0)
    kept = [sequence(seed, **params) for seed in range(200)]
    everyone = [plain, *kept, greedy]
    for one in everyone:
        one.kept = []
    tokens, log_probs = SamplingBatch(everyone, torch.device("cpu"), score).sample(LOGITS.expand(202, -1).clone())
    scaled = LOGITS.double() / params.get("temperature", 1.0)
    for one, token, log_prob in zip(kept, tokens[1:-1].tolist(), log_probs[1:-1].tolist(), strict=True):
        assert one.kept is not None
        (ids,) = one.kept
        assert ids == sorted(ids)
        assert token in ids
        assert log_prob == pytest.approx((scaled[token] - scaled[ids].logsumexp(0)).item(), abs=1e-6)
    assert (plain.kept, greedy.kept) == ([], [])
    full = LOGITS.double().log_softmax(0)
    assert log_probs[[0, -1]].tolist() == pytest.approx(full[tokens[[0, -1]]].tolist(), abs=1e-6)


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(byte_tokenizer)


def feed(tokenizer: Any, text: str, *stop: str) -> tuple[TextStream, list[str], str | None]:
    stream = TextStream(tokenizer, SamplingParams(stop=stop))
    ids, shown = tokenizer.encode(text), []
    for n in range(1, len(ids) + 1):
        match = stream.update(ids[:n], final=n == len(ids))
        shown.append(stream.safe_text)
        if match is not None:
            return stream, shown, match
    return stream, shown, None


@pytest.mark.parametrize("text", ["plain", "gr\u00fc\u00dfe \u4f60\u597d \U0001f600!", "a<|end|>b", "  two  spaces "])
def test_the_stream_ends_with_the_whole_text_and_never_takes_back(tokenizer: Any, text: str) -> None:
    stream, shown, match = feed(tokenizer, text)
    assert match is None
    assert stream.text == decode(tokenizer, tokenizer.encode(text), SamplingParams())
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)
        assert "\ufffd" not in later


def test_broken_characters_are_shown_at_the_end_only(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, SamplingParams())
    ids = tokenizer.encode("\u4f60")[:2]
    assert stream.update(ids) is None
    assert stream.text == ""
    stream.update(ids, final=True)
    assert "\ufffd" in stream.text


def test_the_first_stop_string_wins_and_its_beginning_is_held_back(tokenizer: Any) -> None:
    stream, shown, match = feed(tokenizer, "one STOP two END", "END", "STOP", "TOPX")
    assert match == "STOP"
    assert stream.stop_at == 4
    assert stream.text[: stream.stop_at] == "one "
    assert all("S" not in text for text in shown[:-1])
    _, shown, match = feed(tokenizer, "one STO two", "STOP")
    assert match is None
    assert shown[-1] == "one STO two"
