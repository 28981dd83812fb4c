from __future__ import annotations

from slime_core.testing import ModelContract


class TestLlama(ModelContract):
    component = "llama"


class TestLlamaTied(ModelContract):
    component = "llama"
    config = {"tie_word_embeddings": True, "num_key_value_heads": 4}
