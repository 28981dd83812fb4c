from __future__ import annotations

from slime_core.testing import ModelContract

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


class TestQwen3Moe(ModelContract):
    component = "qwen3_moe"
    config = EXPERTS


class TestQwen3MoeWithDenseLayersAndPlainProbabilities(ModelContract):
    component = "qwen3_moe"
    config = {
        **EXPERTS,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    }
