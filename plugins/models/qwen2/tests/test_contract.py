from __future__ import annotations

from slime_testing_contracts import MegatronModelContract, ModelContract


class TestQwen2(ModelContract):
    component = "qwen2"


class TestQwen2Tied(ModelContract):
    component = "qwen2"
    config = {"tie_word_embeddings": True, "num_key_value_heads": 4}


class TestMegatron(MegatronModelContract):
    component = "qwen2"


class TestMegatronTied(MegatronModelContract):
    component = "qwen2"
    config = {"tie_word_embeddings": True, "num_key_value_heads": 4}
