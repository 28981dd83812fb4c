"""Weights and KV cache of the embedded engine, freed and taken again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core.errors import EngineError, WeightSyncError
from slime_core.models.hf_io import read_weights
from slime_core.weights.sync import tensor_checksum
from tests.embedded_cores import make_core, prompts, run

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
