"""Flags that state the architecture, against config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from slime_commands.models.megatron_flags import megatron_flags
from slime_commands.models.presets import ModelPreset, model_presets
from slime_trainer_megatron.arguments.architecture import check_architecture
from slime_trainer_megatron.families import Architecture

from slime_core.config import Args
from slime_core.config.foreign import Lists, find_foreign, find_owners
from slime_core.config.settings import FLAG, Entry
from slime_core.errors import ConfigError
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import resolve as resolve_plugin
from tests.sweeps import sweep

OWNERS = find_owners(["--no-plugins"], {})[0]
WITH_FAMILY = [p for p in model_presets().values() if p.model_type in current_registry().names("megatron_models")]

QWEN3_MOE = "qwen3-30B-A3B"
DEEPSEEK = "deepseek-v3"


def architecture_of(hf: Mapping[str, Any]) -> Architecture:
    family = resolve_plugin("megatron_models", str(hf["model_type"]), origin="test")
    found: Architecture = family.obj(hf).architecture
    return found


def flags_of(preset: ModelPreset) -> dict[str, Any]:
    given = [(flag.replace("-", "_"), Entry(value, FLAG)) for flag, value in megatron_flags(preset).items()]
    assert all(find_foreign(OWNERS, name) for name, _ in given)
    return {name: entry.value for name, entry in Lists(OWNERS, {}).read(given).items()}


def check(preset: str, **flags: Any) -> None:
    hf = model_presets()[preset].config
    check_architecture(Args(**flags), hf, architecture_of(hf))


@sweep("preset", WITH_FAMILY)
def test_the_flags_of_every_preset_agree_with_its_family(preset: ModelPreset) -> None:
    flags = flags_of(preset)
    assert len(flags) >= 15
    check_architecture(Args(**flags), preset.config, architecture_of(preset.config))


MISMATCHES = [
    ("qwen3-4B", {"num_layers": 30}, "--num-layers 30: the model has 36 (num_hidden_layers)"),
    ("qwen3-4B", {"kv_channels": 80}, "--kv-channels 80: the model has 128 (head_dim)"),
    ("qwen3-4B", {"vocab_size": 152064}, "--vocab-size 152064: the model has 151936 (vocab_size)"),
    ("qwen3-4B", {"rotary_base": 1e4}, "--rotary-base 10000.0: the model has 1000000.0 (rope_theta)"),
    ("qwen3-4B", {"layernorm_epsilon": 1e-5}, "--norm-epsilon 1e-05: the model has 1e-06 (rms_norm_eps)"),
    ("qwen3-4B", {"untie_embeddings_and_output_weights": True}, "the model has tie_word_embeddings True"),
    ("qwen3-4B", {"qk_layernorm": False}, "--no-qk-layernorm: the model has True"),
    ("qwen3-4B", {"normalization": "LayerNorm"}, "--normalization LayerNorm: the model has RMSNorm"),
    ("qwen3-4B", {"swiglu": False}, "the model has another activation"),
    ("qwen3-4B", {"group_query_attention": False}, "the model has 8 key-value heads for 32 heads"),
    ("qwen3-4B", {"use_rope_scaling": True}, "the model has rope_scaling None"),
    ("qwen3-4B", {"num_moe_experts": 8}, "--num-moe-experts 8: the model has none"),
    ("qwen3-4B", {"window_size": [128, 0]}, "--window-size 128 0: the model has none (sliding_window)"),
    ("llama3.1-8B-Instruct", {"rope_scaling_factor": 4.0}, "--rope-scaling-factor 4.0: the model has rope_scaling"),
    (QWEN3_MOE, {"num_moe_experts": 64}, "--num-moe-experts 64: the model has 128"),
    (QWEN3_MOE, {"moe_shared_expert_intermediate_size": 9}, "the model has none"),
    (DEEPSEEK, {"moe_layer_freq": 1}, "--moe-layer-freq 1: the model has [0]*3+[1]*58"),
    (DEEPSEEK, {"moe_router_score_function": "softmax"}, "the model has sigmoid"),
    (DEEPSEEK, {"moe_router_group_topk": 2}, "--moe-router-group-topk 2: the model has 4 (topk_group)"),
    (DEEPSEEK, {"rotary_scaling_factor": 1.0}, "the model has 40.0 (rope_scaling.factor)"),
    (DEEPSEEK, {"rope_type": "rope"}, "--rope-type rope: the model has yarn"),
    ("qwen3-next-80B-A3B", {"full_attention_interval": 3}, "--full-attention-interval 3: the model has"),
]


@sweep("preset, flags, message", MISMATCHES)
def test_every_kind_of_mismatch_is_seen(preset: str, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(preset, **flags)
    head, line = str(caught.value).split("\n")
    assert head == "flags contradict the model's config.json, which is what is trained; remove or correct them:"
    assert message in line


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("qwen3-4B", {}),
        ("qwen3-4B", {"moe_router_num_groups": 1, "moe_shared_expert_intermediate_size": 0}),
        ("qwen3-4B", {"recompute_method": "uniform", "attention_dropout": 0.1}),
        (QWEN3_MOE, {"ffn_hidden_size": 1}),  # no layer is dense
        (QWEN3_MOE, {"moe_layer_freq": 1}),
        (DEEPSEEK, {"kv_channels": 1, "num_query_groups": 1, "group_query_attention": True}),
        (DEEPSEEK, {"moe_router_pre_softmax": False}),  # says nothing about sigmoid scores
        ("moonlight", {"beta_fast": 7.0, "moe_router_num_groups": 1, "moe_router_group_topk": 1}),
        ("minimax-m2", {"qk_layernorm": True}),
    ],
)
def test_flags_that_say_nothing_else_are_fine(preset: str, flags: dict[str, Any]) -> None:
    check(preset, **flags)
