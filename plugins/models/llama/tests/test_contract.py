from __future__ import annotations

import pytest
from slime_testing_contracts import MegatronModelContract, ModelContract

from slime_core.errors import ConfigError


class TestLlama(ModelContract):
    component = "llama"


class TestLlamaTied(ModelContract):
    component = "llama"
    config = {"tie_word_embeddings": True, "num_key_value_heads": 4}


class TestMegatron(MegatronModelContract):
    component = "llama"


class TestMegatronBiases(MegatronModelContract):
    component = "llama"
    config = {"attention_bias": True, "mlp_bias": True}

    def test_megatron_has_biases_everywhere_or_nowhere(self) -> None:
        with pytest.raises(ConfigError, match="attention_bias True with mlp_bias False is not supported"):
            self.resolved.obj({**self.hf, "mlp_bias": False})


class TestMegatronLlama3(MegatronModelContract):
    component = "llama"
    config = {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    }

    def test_scaling_is_read_and_others_are_refused(self) -> None:
        architecture = self.megatron_model.architecture
        assert architecture.rotary_base == 500000.0
        assert architecture.rope_scaling is not None
        assert architecture.rope_scaling["factor"] == 8.0
        with pytest.raises(ConfigError, match="rope type 'linear' is not supported"):
            self.resolved.obj({**self.hf, "rope_parameters": {"rope_type": "linear", "factor": 2.0}})
