from __future__ import annotations

from slime_models.glm4.megatron import megatron
from slime_trainer_megatron.families import places

# THUDM/GLM-4-9B-0414, from config.json.
GLM4 = {
    "model_type": "glm4", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_numbers_of_glm_4() -> None:
    architecture = megatron(GLM4).architecture
    fields = architecture.transformer
    assert (architecture.rotary_percent, fields["rotary_interleaved"]) == (0.5, True)
    assert (fields["add_qkv_bias"], fields["add_bias_linear"], fields["qk_layernorm"]) == (True, False, False)


def test_four_norms_a_layer() -> None:
    by_hf = {place.hf[0]: place.megatron for place in places(megatron(GLM4)) if place.layer == 7}
    norms = {hf.split(".")[3]: ours.split(".")[3] for hf, ours in by_hf.items() if "layernorm" in hf}
    assert norms == {
        "input_layernorm": "input_layernorm",
        "post_self_attn_layernorm": "post_self_attn_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "post_mlp_layernorm": "post_mlp_layernorm",
    }
