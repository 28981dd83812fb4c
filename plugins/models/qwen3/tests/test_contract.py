from __future__ import annotations

from slime_core.testing import ModelContract


class TestQwen3(ModelContract):
    component = "qwen3"


class TestQwen3Tied(ModelContract):
    component = "qwen3"
    config = {"tie_word_embeddings": True, "num_key_value_heads": 4}
