from __future__ import annotations

import re

import pytest
from slime_model_mimo.megatron import megatron
from slime_testing_contracts import MegatronModelContract

from slime_core.errors import ConfigError


class TestMimo(MegatronModelContract):
    component = "mimo"
    reference = "qwen2"

    def test_layers_of_multi_token_prediction_are_carried(self) -> None:
        (pattern,) = self.megatron_model.carried
        assert re.fullmatch(pattern, "model.mtp_layers.0.self_attn.q_proj.weight")
        assert not re.fullmatch(pattern, "model.layers.0.self_attn.q_proj.weight")


def test_what_is_not_computed_is_refused() -> None:
    hf = TestMimo().hf
    with pytest.raises(ConfigError, match="use_sliding_window True is not supported"):
        megatron({**hf, "use_sliding_window": True})
    assert not megatron({**hf, "attention_bias": False}).architecture.transformer["add_qkv_bias"]
