"""Tiny random models of the decoder families of transformers, for tests of trainers and engines.

Four layers where a family has layers of several kinds, sliding windows and chunks of a few tokens, and weights that
are large enough for a difference in attention to show.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
_DROPPED = object()
"""Value of an entry of `_COMMON` that a family does not take."""
_MOE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
_SHARED = {**_MOE, "shared_expert_intermediate_size": 16}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    **_ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_group": 2, "head_dim": _DROPPED,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_WINDOW = {"sliding_window": 4}
_GEMMA = {**_WINDOW, "query_pre_attn_scalar": 8}
_GEMMA4 = {**_WINDOW, "global_head_dim": 8, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0}
_INDEXED = {**_LATENT, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 8}
"""More heads, since with few the scores of many keys are zero, and the choice among equals is arbitrary."""
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8,
}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
_QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {
        "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 16, **_WINDOW,
    },
    "apertus": {},
    "arcee": {},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "bitnet": {},
    "bloom": {},
    "codegen": {**_GPT, "rotary_dim": 4},
    "cohere": {},
    "cohere2": _WINDOW,
    "cwm": _WINDOW,
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED,
    "diffllama": {},
    "doge": {},
    "dots1": _ROUTED,
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone4": _WINDOW,
    "exaone_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_shared_experts": 1,
        "n_group": 1, "topk_group": 1,
    },
    "falcon": {"head_dim": _DROPPED, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
    "falcon_h1": {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma2": _GEMMA,
    "gemma3": {"text_config": _GEMMA, "vision_config": {**_VISION, "image_size": 28, "patch_size": 14}},
    "gemma3_text": _GEMMA,
    "gemma4": {"text_config": _GEMMA4, "vision_config": _VISION},
    "gemma4_text": _GEMMA4,
    "glm": {},
    "glm4": {},
    "glm4_moe": _ROUTED,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4, "num_layers": 4, "num_heads": 4},
    "gpt_neox": {},
    "gpt_oss": {**_LOCAL, **_WINDOW},
    "gptj": {**_GPT, "rotary_dim": 4},
    "granite": {"logits_scaling": 3.0},
    "granitemoe": _LOCAL,
    "granitemoehybrid": {
        **_LOCAL, **_MAMBA, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"] * 2,
    },
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 16},
    "granite_swa": _WINDOW,
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": {"num_experts": 4, "num_experts_per_tok": 2, "expert_hidden_dim": 16, "moe_intermediate_size": 16},
    "jais2": {},
    "jamba": {
        "mamba_d_state": 8, "mamba_dt_rank": 8, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_L_cache": 3},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "num_dense_layers": 1,
    },
    "llama": {},
    "llama4_text": {
        **_LOCAL, "num_experts_per_tok": 1, "attention_chunk_size": 8, "intermediate_size_mlp": 48,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "minicpm3": _LATENT,
    "minimax": {**_LOCAL, "block_size": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    "minimax_m2": _LOCAL,
    "ministral": _WINDOW,
    "ministral3": {},
    "mistral": _WINDOW,
    "mixtral": _LOCAL,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 512},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        **_ROUTED, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8,
        "layers_block_type": ["mamba", "attention", "mamba", "moe"], "moe_shared_expert_intermediate_size": 16,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmo_hybrid": {**_LINEAR, "layer_types": ["linear_attention", "full_attention"] * 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": _LOCAL,
    "qwen2": {},
    "qwen2_moe": _SHARED,
    "qwen3": {},
    "qwen3_5": {"text_config": _LINEAR, "vision_config": _QWEN_VISION},
    "qwen3_5_moe": {"text_config": {**_SHARED, **_LINEAR}, "vision_config": _QWEN_VISION},
    "qwen3_5_moe_text": {**_SHARED, **_LINEAR},
    "qwen3_5_text": _LINEAR,
    "qwen3_moe": _MOE,
    "qwen3_next": {**_SHARED, **_LINEAR},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": _ROUTED,
    "stablelm": {},
    "starcoder2": _WINDOW,
    "vaultgemma": _GEMMA,
}  # fmt: skip
"""`model_type` -> entries of its `config.json`."""


def write_family(directory: Path, family: str) -> Path:
    """Write a tiny random model of a family, with the tokenizer of `tiny_model`, and return the directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from slime_core.models.config import read_hf_config
    from slime_core.models.hf_io import copy_assets
    from slime_testing_contracts.tiny import tiny_model

    copy_assets(tiny_model(), directory)
    known = read_hf_config(tiny_model())
    common = {**_COMMON, "vocab_size": known["vocab_size"], "eos_token_id": known["eos_token_id"]}
    own, images = FAMILIES[family], "vision_config" in FAMILIES[family]
    entries = {**own, "text_config": {**common, **own["text_config"]}} if images else {**common, **own}
    config = AutoConfig.for_model(family, **deepcopy({name: x for name, x in entries.items() if x is not _DROPPED}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        build: Any = (AutoModelForImageTextToText if images else AutoModelForCausalLM).from_config
        model: Any = build(config, dtype=torch.float32)
        for parameter in model.parameters():  # the first values of norms and biases are constants
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            else:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    path = directory / "config.json"
    assert json.loads(path.read_text(encoding="utf-8"))["model_type"] == family
    return directory
