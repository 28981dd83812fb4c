from __future__ import annotations

import re
from typing import Any

import pytest
from slime_models.minimax_m2.megatron import megatron
from slime_trainer_megatron.families import places

from slime_core.errors import ConfigError


def config(**changes: Any) -> dict[str, Any]:
    """As released: MiniMax-M2 names some fields otherwise than transformers does."""
    released = {
        "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        "rotary_dim": 64, "rope_theta": 5000000, "num_local_experts": 256, "num_experts_per_tok": 8,
        "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0, "num_mtp_modules": 3, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    return {**released, **changes}


def test_the_released_model() -> None:
    model = megatron(config())
    architecture, fields = model.architecture, model.architecture.transformer
    assert (architecture.rotary_base, architecture.rotary_percent) == (5e6, 0.5)
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_ffn_hidden_size"]) == (256, 8, 1536)
    assert fields["moe_router_score_function"] == "sigmoid"
    assert fields["moe_router_enable_expert_bias"]
    names = [name for place in places(model) for name in place.hf]
    assert "model.layers.61.block_sparse_moe.experts.255.w2.weight" in names
    assert "model.layers.0.block_sparse_moe.e_score_correction_bias" in names
    assert sum(".q_norm." in name or ".k_norm." in name for name in names) == 124


def test_modules_of_multi_token_prediction_are_carried() -> None:
    model = megatron(config())
    names = ["model.layers.61.x", "model.layers.62.x", "model.layers.64.x", "model.layers.65.x", "model.layers.620.x"]
    assert [any(re.fullmatch(pattern, name) for pattern in model.carried) for name in names] == [
        False, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for minimax_m2; allowed: 'sigmoid'"),
        ({"use_qk_norm": False}, "use_qk_norm False"),
        ({"shared_intermediate_size": 1024}, "shared_intermediate_size 1024"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 of 256 experts; allowed: 2 to 256"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron(config(**change))
