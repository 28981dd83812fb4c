"""The decoder and its parts against plain implementations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from slime_embedded.models.batch_invariant import by_tile
from slime_embedded.models.decoder import Decoder, init_weights
from slime_embedded.models.feed_forward import MixtureOfExperts
from slime_embedded.models.logprobs import response_log_probs
from slime_embedded.models.packed import _row_map
from slime_embedded.models.rope import apply_rope, rope_cos_sin
from slime_embedded.models.routing import FREE, LayerRouting
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from slime_core.errors import CheckpointError, ConfigError
from slime_core.models.config import ModelConfig, MoEConfig

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


def test_asking_for_rows_gives_those_rows_and_the_same_gradients() -> None:
    _, ours = pair("qwen3")
    ids = packed_ids()
    rows = np.random.default_rng(0).permutation(len(ids))[:60]
    weight = torch.randn(60, 32)
    gradients = []
    for hidden in (ours.hidden(ids, LENGTHS)[rows], ours.hidden(ids, LENGTHS, rows=rows)):
        gradients.append((hidden, torch.autograd.grad((hidden * weight).sum(), list(ours.parameters()))))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


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


LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip


def hf_config(**rope: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 4096, "head_dim": 16,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default", **rope},
    }  # fmt: skip


@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_rotations_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    raw = hf_config(**rope)
    config = ModelConfig.from_hf(raw)
    positions = torch.tensor([0, 1, 2, 17, 300, 4000])
    cos, sin = rope_cos_sin(config, positions, "cpu")
    x = torch.randn(1, 4, 6, 16)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw))(x, positions[None])
    torch.testing.assert_close(cos, theirs[0][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin, theirs[1][0], atol=1e-6, rtol=0)
    expected, _ = apply_rotary_pos_emb(x, x, *theirs)
    torch.testing.assert_close(apply_rope(x[0].transpose(0, 1), cos, sin), expected[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("rope", "word"), [({"rope_type": "yarn", "factor": 2.0}, "yarn"), ({"rope_type": "linear"}, "factor")]
)
def test_unknown_scaling_is_refused(rope: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        rope_cos_sin(ModelConfig.from_hf(hf_config(**rope)), torch.arange(2), "cpu")


def test_gradients_of_repeated_rows_are_added_in_one_order_with_two_threads() -> None:
    rows = np.random.default_rng(0).integers(0, 600, 4000)
    _, first, index = np.unique(rows, return_index=True, return_inverse=True)
    gather = _row_map(index, first, None, "cpu", np.delete(np.arange(len(index)), first))
    x, grad = torch.zeros(len(first), 576, requires_grad=True), torch.randn(len(index), 576)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [torch.autograd.grad(gather(x), x, grad)[0] for _ in range(6)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(part, found[0]) for part in found)
    expected = torch.zeros(len(first), 576, dtype=torch.float64).index_add_(0, torch.from_numpy(index), grad.double())
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)


TOKENS = [[1, 2, 3, 4], [0, 5], [6, 3, 2]]
RESPONSES = [2, 1, 2]


def make_logits(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 9, 7, generator=generator, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_each_token_is_predicted_by_the_row_before_it(temperature: float) -> None:
    logits = make_logits()
    log_probs, entropies = response_log_probs(logits, TOKENS, RESPONSES, temperature, with_entropy=True)
    assert entropies is not None
    table = torch.log_softmax(logits[0] / temperature, dim=-1)
    start = 0
    for i, (tokens, length) in enumerate(zip(TOKENS, RESPONSES, strict=True)):
        places = range(len(tokens) - length, len(tokens))
        expected = torch.stack([table[start + t - 1, tokens[t]] for t in places])
        rows = torch.stack([table[start + t - 1] for t in places])
        torch.testing.assert_close(log_probs[i], expected)
        torch.testing.assert_close(entropies[i], -(rows.exp() * rows).sum(-1))
        start += len(tokens)


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="logits of 9 tokens, but 2 samples with 6 tokens"):
        response_log_probs(make_logits(), TOKENS[:2], RESPONSES[:2])
    with pytest.raises(ValueError, match="a prompt token is needed"):
        response_log_probs(make_logits(), TOKENS, [4, 1, 2])


def mixture(normalizes: bool = True, *, hidden: int = 8, number: int = 5, per_token: int = 2) -> MixtureOfExperts:
    torch.manual_seed(0)
    module = MixtureOfExperts(hidden, MoEConfig(number, per_token, 6, normalizes, (0,)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return module


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-np.float64(x))))


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_case_by_hand(normalizes: bool) -> None:
    """Hidden size 1, three experts that scale: expert e makes silu(g_e x) * u_e x * d_e of x."""
    module = MixtureOfExperts(1, MoEConfig(3, 2, 1, normalizes, (0,)))
    gates, ups, downs, router = (1.0, 2.0, -1.0), (1.0, 0.5, 3.0), (2.0, 1.0, 1.0), (0.0, 1.0, 2.0)
    with torch.no_grad():
        module.gate.weight.copy_(torch.tensor(router)[:, None])
        for expert, g, u, d in zip(module.experts, gates, ups, downs, strict=True):
            for projection, value in ((expert.gate_proj, g), (expert.up_proj, u), (expert.down_proj, d)):
                projection.weight.fill_(value)
    x = 0.7

    def expert_of(e: int) -> float:
        return gates[e] * x * sigmoid(gates[e] * x) * ups[e] * x * downs[e]

    weights = np.exp(np.array(router) * x) / np.exp(np.array(router) * x).sum()

    def mixed(first: int, second: int) -> float:
        total = weights[first] + weights[second] if normalizes else 1.0
        return (weights[first] * expert_of(first) + weights[second] * expert_of(second)) / total

    rows = torch.full((3, 1), x)
    # Free: experts 2 and 1 have the largest probabilities. Replayed: 0 and 2 whatever the router says, in any order.
    given = torch.tensor([[FREE, FREE], [0, 2], [1, 2]])
    routing = LayerRouting(given)
    found = module(rows, routing)[:, 0].tolist()
    assert found == pytest.approx([mixed(1, 2), mixed(0, 2), mixed(1, 2)], rel=1e-6)
    assert found[1] != pytest.approx(found[0], rel=1e-3)
    assert routing.chosen is not None
    assert routing.chosen.tolist() == [[1, 2], [0, 2], [1, 2]]
    assert routing.mismatches is not None
    assert routing.mismatches.tolist() == [1.0, 2.0], "one of two replayed rows is not the router's own"
    assert module(rows)[:, 0].tolist() == pytest.approx([mixed(1, 2)] * 3, rel=1e-6)


def plain(module: MixtureOfExperts, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Decode one token at a time."""
    probabilities = torch.softmax(x @ module.gate.weight.T, -1)
    rows = []
    for row, probability, experts in zip(x, probabilities, chosen.tolist(), strict=True):
        weights = probability[experts] / (probability[experts].sum() if module.normalizes else 1.0)
        rows.append(sum(w * module.experts[e](row[None])[0] for w, e in zip(weights, experts, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("normalizes", [True, False])
def test_gradients_of_replayed_experts_are_those_of_a_plain_loop(normalizes: bool) -> None:
    module = mixture(normalizes).double()
    x = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(17, 5).topk(2).indices
    grad = torch.randn(17, 8, dtype=torch.float64)
    inputs = [x, *module.parameters()]
    found = module(x, LayerRouting(chosen.sort(-1).values))
    expected = plain(module, x, chosen)
    # Router probabilities are taken in float32, as transformers does.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(y, inputs, grad, allow_unused=True) for y in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_in_tiles_a_row_does_not_depend_on_the_others() -> None:
    def in_tiles(function: object, rows: torch.Tensor) -> torch.Tensor:
        return by_tile(lambda tile: (function(tile),), rows)[0]  # type: ignore[operator]

    module, x = mixture(hidden=64, number=8), torch.randn(70, 64)
    whole = module(x, None, in_tiles)
    for rows in ([3], [69, 0, 11], list(range(33))):
        assert torch.equal(module(x[rows], None, in_tiles), whole[rows])
    torch.testing.assert_close(whole, module(x), rtol=1e-5, atol=1e-5)
