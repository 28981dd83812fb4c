from __future__ import annotations

from slime_testing_contracts import MegatronModelContract, ModelContract

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


class TestMegatron(MegatronModelContract):
    component = "qwen3_moe"
    config = {**EXPERTS, "num_experts": 4}

    def test_probabilities_are_normalized_as_in_the_file(self) -> None:
        fields = self.megatron_model.architecture.transformer
        assert not fields["moe_router_pre_softmax"]
        assert self.resolved.obj({**self.hf, "norm_topk_prob": False}).architecture.transformer[
            "moe_router_pre_softmax"
        ]


class TestMegatronMixed(MegatronModelContract):
    component = "qwen3_moe"
    config = {**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}

    def test_which_layers_have_experts(self) -> None:
        assert self.megatron_model.architecture.transformer["moe_layer_freq"] == [0, 0, 0, 1]
