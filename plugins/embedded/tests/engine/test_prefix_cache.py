from __future__ import annotations

import random

import torch
from slime_embedded.engine.kv_cache import KVCache
from slime_embedded.engine.prefix_cache import BLOCK, PrefixCache
from slime_embedded.engine.sampling_params import SamplingParams
from slime_embedded.engine.sequence import Sequence

from slime_core.models.config import ModelConfig

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


def test_a_running_sequence_offers_its_row_until_it_is_dropped() -> None:
    cache, prefixes = make_cache(), PrefixCache()
    sequence = stored(cache, list(range(40)))
    other = stored(cache, list(range(10, 40)))
    prefixes.add_running(sequence, 40)
    owner, length = prefixes.match([*range(30), 0, 0], 31)
    assert length == 30
    assert owner is not None
    assert owner.read(30)[0, 1, 0, :, 0].tolist() == list(range(30))
    prefixes.drop_running(sequence)
    cache.free(sequence)
    assert other.row == 0
    assert prefixes.match(list(range(40)), 39) == (None, 0)
