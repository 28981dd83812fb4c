from __future__ import annotations

from slime_testing_contracts import MegatronModelContract, ModelContract


class TestQwen3(ModelContract):
    component = "qwen3"


class TestQwen3Tied(ModelContract):
    component = "qwen3"
    config = {"tie_word_embeddings": True, "num_key_value_heads": 4}


class TestMegatron(MegatronModelContract):
    component = "qwen3"


class TestMegatronTied(MegatronModelContract):
    component = "qwen3"
    config = {"tie_word_embeddings": True}
