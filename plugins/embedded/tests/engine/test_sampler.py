"""Sampling parameters, sampling, and text from tokens."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slime_embedded.engine.sampler import SamplingBatch, ScoreTokens, derive_seed, uniforms
from slime_embedded.engine.sampling_params import SamplingParams
from slime_embedded.engine.sequence import Sequence, TextStream, decode
from slime_embedded.models.batch_invariant import log_probs_of

from slime_core.errors import EngineError


def test_defaults_and_none_are_sglangs() -> None:
    params = SamplingParams.parse({"temperature": None, "stop": None})
    assert params == SamplingParams()
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (128, 1.0, 1.0, -1)


def test_values_are_normalised() -> None:
    params = SamplingParams.parse({"stop": "a", "stop_token_ids": [3, 4], "max_new_tokens": 5.0, "temperature": 1})
    assert params.stop == ("a",)
    assert params.stop_token_ids == (3, 4)
    assert params.max_new_tokens == 5
    assert SamplingParams.parse({"stop": ["a", "", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"top-p": 0.5}, ["top-p", "top_p"]),
        ({"temprature": 0.5}, ["temprature", "temperature"]),
        ({"qqqq": 1}, ["qqqq", "max_new_tokens"]),
        ({"top_p": "0.5"}, ["top_p", "'0.5'", "number"]),
        ({"top_p": float("nan")}, ["top_p", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "inf"]),
        ({"top_k": 0}, ["top_k", "0", "-1"]),
        ({"ignore_eos": 1}, ["ignore_eos", "true or false"]),
        ({"stop": [1]}, ["stop", "strings"]),
        ({"stop_token_ids": ["a"]}, ["stop_token_ids", "'a'"]),
        ({"sampling_seed": 1.5}, ["sampling_seed", "1.5"]),
        ({"repetition_penalty": 1e39}, ["repetition_penalty", "1e+39", "100"]),
        ({"presence_penalty": 9}, ["presence_penalty", "9"]),
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


@pytest.mark.parametrize("temperature", [*(pytest.param(t, marks=pytest.mark.slow) for t in (1.0, 2.0)), 0.5])
def test_samples_follow_the_scaled_distribution_and_report_its_log_probs(temperature: float) -> None:
    tokens, log_probs = draw(20_000, temperature=temperature)
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
    tokens, log_probs = draw(10_000, **params)
    full = torch.softmax(LOGITS.double(), -1)
    cut = torch.zeros_like(full)
    cut[allowed] = full[allowed]
    assert_distribution(tokens, cut / cut.sum())
    torch.testing.assert_close(log_probs.double(), full.log()[tokens], atol=1e-5, rtol=0)


def test_a_row_does_not_see_its_neighbours() -> None:
    alone = SamplingBatch([sequence(3)], torch.device("cpu"))
    neighbours = [sequence(1, temperature=0), sequence(3), sequence(2, top_p=0.5), sequence(4, min_new_tokens=5)]
    crowd = SamplingBatch(neighbours, torch.device("cpu"))
    for _ in range(50):
        one, _ = alone.sample(LOGITS[None].clone())
        many, _ = crowd.sample(LOGITS.expand(4, -1).clone())
        assert many[1] == one[0]


def test_minimum_length_forbids_stop_tokens() -> None:
    item = sequence(0, stop_ids=(4,), min_new_tokens=2, temperature=0)
    batch = SamplingBatch([item], torch.device("cpu"))
    for expected in (1, 1, 4):
        token, log_prob = batch.sample(LOGITS[None].clone())
        assert token.item() == expected
        assert log_prob.item() == pytest.approx(torch.log_softmax(LOGITS, -1)[expected].item(), abs=1e-6)
        item.tokens.append(int(token))
        item.log_probs.append(float(log_prob))


def test_penalties_move_away_from_what_was_said() -> None:
    for params in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 5.0}):
        item = sequence(0, prompt=(0,), temperature=0, **params)
        item.tokens.append(4)
        item.log_probs.append(-1.0)
        token, _ = SamplingBatch([item], torch.device("cpu")).sample(LOGITS[None].clone())
        assert token.item() == 1


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1000,), -1e4)
    logits[500] = 0.0
    tokens, _ = draw(5000, logits)
    assert set(tokens.tolist()) == {500}


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
@pytest.mark.parametrize("params", [{"top_k": 3, "temperature": 0.7}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 9}])
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
