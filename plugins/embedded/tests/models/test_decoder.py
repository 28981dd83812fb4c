"""The decoder against transformers' models of the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from slime_embedded.models.decoder import Decoder, init_weights
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from slime_core.errors import CheckpointError
from slime_core.models.config import ModelConfig

torch.set_num_threads(1)

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": (LlamaConfig(**SHAPE, tie_word_embeddings=False), {}),
    "llama3-rope": (LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE), {}),
    "llama-biases": (
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    ),
    "qwen2": (Qwen2Config(**SHAPE, tie_word_embeddings=True), {"qkv_bias": True}),
    "qwen3": (Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True), {"qk_norm": True}),
    "one-kv-head": (Qwen3Config(**{**SHAPE, "num_key_value_heads": 1}, head_dim=16), {"qk_norm": True}),
    "no-grouping": (LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}), {}),
}
LENGTHS = [5, 70, 33, 1, 100, 64]


def pair(family: str) -> tuple[Any, Decoder]:
    config, switches = FAMILIES[family]
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # norms at 1 and biases at 0 would hide mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = Decoder.from_weights(ModelConfig.from_hf(config.to_dict(), **switches), reference.state_dict().items())
    return reference, ours


def packed_ids() -> torch.Tensor:
    return torch.randint(0, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(family: str) -> None:
    reference, ours = pair(family)
    ids = packed_ids()
    expected = torch.cat([reference(part[None]).logits[0] for part in torch.split(ids, LENGTHS)])
    found = ours(ids, LENGTHS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in ours.named_parameters():
        scale = gradients[name].abs().max()
        torch.testing.assert_close(parameter.grad / scale, gradients[name] / scale, rtol=0, atol=1e-5, msg=name)


def test_packed_equals_one_by_one() -> None:
    _, ours = pair("qwen3")
    ids = packed_ids()
    singly = torch.cat([ours.hidden(part, [len(part)]) for part in torch.split(ids, LENGTHS)])
    torch.testing.assert_close(ours.hidden(ids, LENGTHS), singly, rtol=1e-5, atol=1e-6)


def test_asking_for_rows_gives_those_rows_and_the_same_gradients() -> None:
    _, ours = pair("qwen3")
    ids = packed_ids()
    rows = np.random.default_rng(0).permutation(len(ids))[:60]
    weight = torch.randn(60, 32)
    gradients = []
    for hidden in (ours.hidden(ids, LENGTHS)[rows], ours.hidden(ids, LENGTHS, rows=rows)):
        gradients.append((hidden, torch.autograd.grad((hidden * weight).sum(), list(ours.parameters()))))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_recompute_changes_no_bit() -> None:
    _, ours = pair("qwen3")
    ids = packed_ids()
    rows = np.arange(0, len(ids), 3)
    results = []
    for recompute in (False, True):
        ours.recompute = recompute
        ours.zero_grad()
        hidden = ours.hidden(ids, LENGTHS, rows=rows)
        hidden.square().sum().backward()
        results.append((hidden, [p.grad for p in ours.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_init_weights_follow_hf_and_the_seed() -> None:
    hf = FAMILIES["qwen2"][0].to_dict() | {"initializer_range": 0.05}
    config = ModelConfig.from_hf(hf, qkv_bias=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    weights, again, other = init_weights(config, 3), init_weights(config, 3), init_weights(config, 4)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(weights[n], again[n]) for n in weights)
    assert not torch.equal(weights["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    assert torch.equal(weights["model.norm.weight"], torch.ones(32))
    assert torch.equal(weights["model.layers.0.self_attn.q_proj.bias"], torch.zeros(32))
    assert "lm_head.weight" not in weights
    Decoder.from_weights(config, weights.items())


def test_weights_that_do_not_fit_are_all_listed() -> None:
    config = ModelConfig.from_hf(FAMILIES["qwen3"][0].to_dict(), qk_norm=True)
    weights = init_weights(config, 0)
    del weights["model.norm.weight"]
    weights["model.extra"] = torch.zeros(1)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, 31)
    with pytest.raises(CheckpointError) as caught:
        Decoder.from_weights(config, weights.items(), origin="some/dir")
    message = str(caught.value)
    for part in ("some/dir", "missing model.norm.weight", "unknown model.extra", "[48, 31]", "[48, 32]"):
        assert part in message


def test_a_stored_copy_of_a_tied_head_and_old_rope_buffers_are_ignored() -> None:
    config = ModelConfig.from_hf(FAMILIES["qwen3"][0].to_dict(), qk_norm=True)
    weights = init_weights(config, 0)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    decoder = Decoder.from_weights(config, weights.items())
    assert decoder.head_weight is decoder.model.embed_tokens.weight
