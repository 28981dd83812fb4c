from __future__ import annotations

from slime_testing_contracts import MegatronModelContract


class TestGlm4(MegatronModelContract):
    component = "glm4"
    config = {"head_dim": 8, "pad_token_id": None}


class TestGlm4WithoutBiases(MegatronModelContract):
    component = "glm4"
    config = {"head_dim": 16, "attention_bias": False, "pad_token_id": None}
