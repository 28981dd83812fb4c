from __future__ import annotations

from typing import Any

import pytest
from slime_models.qwen3_next.megatron import megatron
from slime_trainer_megatron.families import places

from slime_core.errors import ConfigError


def config(**changes: Any) -> dict[str, Any]:
    """As released: Qwen3-Next-80B-A3B names some fields otherwise than transformers does."""
    released = {
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    return {**released, **changes}


def test_the_released_model() -> None:
    model = megatron(config())
    architecture, fields = model.architecture, model.architecture.transformer
    assert (architecture.rotary_base, architecture.rotary_percent) == (1e7, 0.25)
    assert fields["linear_attention_freq"] == [1, 1, 1, 0] * 12
    assert fields["moe_layer_freq"] == [1] * 48
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_router_pre_softmax"]) == (512, 10, False)
    for name in ("layernorm_zero_centered_gamma", "attention_output_gate", "qk_layernorm", "moe_shared_expert_gate"):
        assert fields[name] is True, name
    names = {name for place in places(model) for name in place.hf if ".mlp.experts." not in name}
    for kind, expected in (("self_attn.q_proj", 12), ("linear_attn.in_proj_ba", 36), ("mlp.shared_expert_gate", 48)):
        assert sum(kind in name for name in names) == expected, kind


def test_both_ways_to_say_which_layers_have_full_attention() -> None:
    kinds = ["linear_attention", "full_attention"] * 24
    by_kinds = megatron(config(layer_types=kinds)).architecture
    by_interval = megatron(config(full_attention_interval=2)).architecture
    assert by_kinds.transformer["linear_attention_freq"] == by_interval.transformer["linear_attention_freq"]
    assert by_kinds.extra == by_interval.extra == {"linear": tuple(range(0, 48, 2))}


def test_dense_layers() -> None:
    fields = megatron(config(decoder_sparse_step=2, mlp_only_layers=[1])).architecture.transformer
    assert fields["moe_layer_freq"] == [0, 0] + [0, 1] * 23
    assert "num_moe_experts" not in megatron(config(num_experts=0)).architecture.transformer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"linear_num_value_heads": 30}, "linear_num_value_heads 30 is not divisible by linear_num_key_heads 16"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok 513 of 512 experts; allowed: 1 to 512"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["sliding_attention"] * 48}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron(config(**change))


def test_context_parallelism_is_refused() -> None:
    from slime_trainer_megatron.layout import Layout

    fields = megatron(config()).architecture.transformer
    Layout(tensor=4, sequence_parallel=True).check_model(fields)
    with pytest.raises(ConfigError, match="--context-parallel-size 2: Megatron cannot cut gated_delta_net"):
        Layout(context=2).check_model(fields)
    six = megatron(config(linear_num_key_heads=6, linear_num_value_heads=6)).architecture.transformer
    with pytest.raises(ConfigError, match="does not divide the model's 6 linear key heads"):
        Layout(tensor=4, sequence_parallel=True).check_model(six)
