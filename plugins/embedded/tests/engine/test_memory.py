"""Memory of the engine: the prefix cache, packed matrices, what is released and taken back."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slime_embedded.engine.kv_cache import KVCache
from slime_embedded.engine.linear import Linear, packed_kernel_works
from slime_embedded.engine.prefix_cache import BLOCK, PrefixCache
from slime_embedded.engine.sampling_params import SamplingParams
from slime_embedded.engine.sequence import Sequence
from slime_embedded.kernels import load

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(520, 256), (512, 512)])
@pytest.mark.skipif(not packed_kernel_works(torch.float32), reason="torch has no packed product here")
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


def test_the_kv_cache_alone_needs_no_update(make_model: MakeModel) -> None:
    directory, _ = make_model()
    core = make_core(directory)
    before = run(core, prompts(2), SAMPLED)
    core.release_memory(["kv_cache"])
    core.memory.resume(None)
    assert [s.output_ids for s in run(core, prompts(2), SAMPLED)] == [s.output_ids for s in before]


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
