"""The layers of slime's own that stand in for Transformer Engine's: attention, norms, and projections to latents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig, build_module
from megatron.core.transformer.enums import AttnMaskType
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.model.attention import CoreAttention
from slime_trainer_megatron.model.latent_attention import LatentSelfAttention
from slime_trainer_megatron.model.specs import RMSNorm
from slime_trainer_megatron.process_groups import ProcessGroups
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from slime_core.errors import ConfigError

LENGTHS = [5, 1, 8, 3]


def core(softmax_scale: float | None = None, **changes: Any) -> CoreAttention:
    fields = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0} | changes
    return CoreAttention(
        TransformerConfig(**fields), 1, AttnMaskType.causal, "self", softmax_scale=softmax_scale
    )  # fmt: skip


def packed(lengths: list[int]) -> PackedSeqParams:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)


def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """[S, heads, dim] by the definition, one key-value head for several heads."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("snd,tnd->nst", query, key) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("nst,tnd->snd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(1)


@pytest.fixture(params=[(4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 8, 4)], ids=["heads", "groups", "narrow values"])
def tensors(request: pytest.FixtureRequest) -> tuple[torch.Tensor, ...]:
    heads, kv_heads, width, value_width = request.param
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    return tuple(torch.randn(sum(LENGTHS), *shape, generator=generator, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_packed_sequences_do_not_see_each_other(
    groups: ProcessGroups, tensors: tuple[torch.Tensor, ...], scale: float | None
) -> None:
    expected = torch.cat(
        [written_out(q, k, v, scale or 8**-0.5) for q, k, v in zip(*(x.split(LENGTHS) for x in tensors))]
    )
    found = core(scale)(*tensors, None, packed_seq_params=packed(LENGTHS))
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    for own, wanted in zip(*(torch.autograd.grad(out, tensors, direction) for out in (found, expected)), strict=True):
        torch.testing.assert_close(own, wanted)


def test_rows_without_packing(groups: ProcessGroups, tensors: tuple[torch.Tensor, ...]) -> None:
    rows = [x.unflatten(0, (1, -1)).expand(2, *x.shape).transpose(0, 1) for x in tensors]
    expected = written_out(*tensors, 8**-0.5)
    torch.testing.assert_close(core()(*rows, None), torch.stack((expected, expected), 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_size": (128, 0)}, r"--window-size \(128, 0\): needs Transformer Engine"),
        ({"attention_dropout": 0.1}, "--attention-dropout 0.1"),
        ({"softmax_type": "learnable"}, "--softmax-type learnable.*only vanilla"),
    ],
)
def test_other_attention_is_refused(groups: ProcessGroups, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        core(**change)


def test_other_norms_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--normalization LayerNorm: .*only RMSNorm"):
        RMSNorm(config(normalization="LayerNorm"), 8)


def config(**changes: Any) -> TransformerConfig:
    fields = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "normalization": "RMSNorm"}
    return TransformerConfig(**{**fields, **changes})


def test_it_is_that_of_transformers() -> None:
    reference, norm = LlamaRMSNorm(8, eps=1e-6), RMSNorm(config(), 8, eps=1e-6)
    with torch.no_grad():
        reference.weight.copy_(torch.randn(8))
        norm.weight.copy_(reference.weight)
    x = torch.randn(3, 2, 8)
    torch.testing.assert_close(norm(x), reference(x))


def test_a_zero_centered_weight_is_stored_minus_one() -> None:
    plain, centered = RMSNorm(config(), 8), RMSNorm(config(layernorm_zero_centered_gamma=True), 8)
    assert torch.equal(centered.weight, torch.zeros(8))
    x = torch.randn(3, 8)
    torch.testing.assert_close(centered(x), plain(x))
    with torch.no_grad():
        plain.weight += 0.25
        centered.weight += 0.25
    torch.testing.assert_close(centered(x), plain(x))


def attention(q_lora_rank: int | None = 12, **params: Any) -> Any:
    config = MLATransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, q_lora_rank=q_lora_rank, kv_lora_rank=10, qk_head_dim=8,
        qk_pos_emb_head_dim=4, v_head_dim=6, rope_type="rope", attention_dropout=0.0, layernorm_epsilon=1e-3,
        add_bias_linear=False, use_cpu_initialization=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    own = spec.submodules.self_attention
    own.submodules.core_attention = CoreAttention
    own.submodules.q_layernorm = own.submodules.kv_layernorm = RMSNorm
    with on_device("cpu"):
        made = ModuleSpec(LatentSelfAttention, {**own.params, **params}, own.submodules)
        return build_module(made, config=config, layer_number=1)


def test_norms_of_latents_have_their_own_epsilon(groups: ProcessGroups) -> None:
    plain, given = attention(), attention(latent_norm_eps=1e-6)
    assert [layer.q_layernorm.eps for layer in (plain, given)] == [1e-3, 1e-6]
    assert [layer.kv_layernorm.eps for layer in (plain, given)] == [1e-3, 1e-6]
