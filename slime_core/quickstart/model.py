"""The demo's model before the warm-up: a random Qwen3-layout decoder of 330,496 parameters, as an HF directory.

`prepare.py` calls it. What a reader would get wrong: nothing here is special to slime; any HF-layout directory of a
supported family takes its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.models.config import load_model_config
from slime_core.models.decoder import init_weights
from slime_core.models.hf_io import write_config, write_weights
from slime_core.quickstart.tokenizer import END, PAD, SPECIAL_TOKENS, write_tokenizer


def hf_config(vocab_size: int) -> dict[str, Any]:
    """`config.json`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "use_cache": True,
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "bos_token_id": None,
        "dtype": "float32",
    }


def write_random_model(directory: Path, seed: int) -> int:
    """Write tokenizer, configuration and random weights; the number of parameters."""
    write_config(directory, hf_config(write_tokenizer(directory)))
    weights = init_weights(load_model_config(directory), seed)
    write_weights(directory, weights.items())
    return sum(tensor.numel() for tensor in weights.values())
